// GroupNorm-SiLU backward, channels first: some lanes of a warp sum a run of packs of one channel; then x_grad is made
// as y in forward, the packs of a tile shared evenly by the threads.
#include "cuda/group_norm_silu_launches.h"
#include "cuda/group_norm_silu_sums.h"

namespace megadiff::cuda::group_norm {
namespace {

// Runs aim at as many warps as keep a large device busy, within these lengths.
constexpr int64_t kWarpsWanted = 4096, kShortestRun = 64, kLongestRun = 1024;

// `each` runs of `packs` packs make up a channel; `lanes` lanes share a run.
struct Runs {
  int each, packs, lanes;
};

__host__ __device__ inline int lanes_for(int64_t packs) {
  int lanes = 1;
  while (lanes < kWarpSize && lanes < packs) lanes *= 2;
  return lanes;
}

Runs runs_of(const GroupNormSilu& args, int pack) {
  const int64_t packs = args.spatial / pack;
  int64_t length = args.batch * args.channels * packs / kWarpsWanted;
  length = ceil_divide(length, kWarpSize) * kWarpSize;
  length = length < kShortestRun ? kShortestRun : length > kLongestRun ? kLongestRun : length;
  return {int(ceil_divide(packs, length)), int(length), lanes_for(packs)};
}

// The sums over packs 0 .. packs - 1 of one channel, in each of the `lanes` lanes that share them. By whole warps.
template <class T, int kPack, class Keep>
__device__ __forceinline__ Sums sum_run(
    const T* x, const T* y_grad, const Channel& channel, bool silu, int packs, int lanes, const Keep& keep) {
  Sums sums = {};
  const Same<Channel> same = {channel};
  stream_pairs<T, kPack>(
      x, y_grad, threadIdx.x % lanes, packs, lanes, [](int i) { return int64_t(i) * kPack; },
      [&](int i, const Pack<T, kPack>& xs, const Pack<T, kPack>& grads) {
        keep(i, xs, grads);
        float dz[kPack], centered[kPack];
        differentiate(xs, grads, same, silu, dz, centered);
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          sums.dz += dz[j];
          sums.product += dz[j] * centered[j];
          sums.x += centered[j];
        }
      });
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    sums.dz += __shfl_xor_sync(kFullMask, sums.dz, offset);
    sums.product += __shfl_xor_sync(kFullMask, sums.product, offset);
    sums.x += __shfl_xor_sync(kFullMask, sums.x, offset);
  }
  return sums;
}

// Two passes: each `lanes` threads of the grid take one run, wherever it lies.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) sum_parts_kernel(GroupNormSilu args, Runs runs) {
  const int64_t run = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / runs.lanes;
  const bool works = run < args.batch * args.channels * runs.each;
  const int64_t line = works ? run / runs.each : 0, part = works ? run % runs.each : 0;  // line: sample and channel
  const int64_t sample = line / args.channels, c = line % args.channels, start = part * runs.packs;
  const int packs = works ? int(smaller(runs.packs, args.spatial / kPack - start)) : 0;
  const int64_t first = line * args.spatial + start * kPack;
  const Sums sums = sum_run<T, kPack>(
      static_cast<const T*>(args.x) + first, static_cast<const T*>(args.y_grad) + first, channel_of(args, sample, c),
      args.silu, packs, runs.lanes, [](int, const Pack<T, kPack>&, const Pack<T, kPack>&) {});
  if (works && threadIdx.x % runs.lanes == 0) store_part(args, sample, c, runs.each, part, sums);
}

// Shared memory: the kept packs of x and y_grad (in one pass), then three floats a channel, then the sums of runs.
template <class T, int kPack>
struct Shared {
  Pack<T, kPack>*x, *y_grad;
  float* channels;
  Sums* runs;

  __device__ __forceinline__ Shared(unsigned char* base, const Tiling& tiling)
      : x(reinterpret_cast<Pack<T, kPack>*>(base)),
        y_grad(reinterpret_cast<Pack<T, kPack>*>(base + tiling.kept_bytes / 2)),
        channels(reinterpret_cast<float*>(base + tiling.kept_bytes)),
        runs(reinterpret_cast<Sums*>(channels + 3 * tiling.channels)) {}
};

size_t channel_bytes(const Tiling& tiling) { return 3 * sizeof(float) * tiling.channels; }

// In one pass, so many runs of each channel that every warp has one.
__host__ __device__ inline int runs_in_tile(const Tiling& tiling, int threads) {
  return (threads / kWarpSize + tiling.channels - 1) / tiling.channels;
}

// Totals of the channels of a tile that is a whole group, which stays in shared memory.
template <class T, int kPack>
__device__ __forceinline__ void sum_tile(
    const GroupNormSilu& args, const Tiling& tiling, const Tile& tile, const Shared<T, kPack>& shared) {
  const int64_t first = first_element(args, tiling, tile);
  const int packs = tile.positions / kPack, each = runs_in_tile(tiling, int(blockDim.x));
  const int length = (packs + each - 1) / each;
  const int lanes = lanes_for(length), at_once = int(blockDim.x) / lanes;
  fill_channels(args, tile, shared.channels, tiling.channels);
  __syncthreads();
  const int all = tile.channels * each;
  for (int turn = 0; turn < all; turn += at_once) {  // the same number of turns for all lanes of a warp
    const int run = turn + int(threadIdx.x) / lanes, c = run < all ? run / each : 0, start = run % each * length;
    const int rest = run < all ? packs - start : 0, count = rest < length ? rest : length;
    const int64_t from = first + c * args.spatial + int64_t(start) * kPack;
    const Sums sums = sum_run<T, kPack>(
        static_cast<const T*>(args.x) + from, static_cast<const T*>(args.y_grad) + from,
        channel_at(shared.channels, tiling.channels, c), args.silu, count, lanes,
        [&](int i, const Pack<T, kPack>& xs, const Pack<T, kPack>& grads) {
          shared.x[c * packs + start + i] = xs;
          shared.y_grad[c * packs + start + i] = grads;
        });
    if (run < all && threadIdx.x % lanes == 0) shared.runs[run] = sums;
  }
  __syncthreads();
  for (int c = threadIdx.x; c < tile.channels; c += blockDim.x) {
    Sums total = {};
    for (int run = c * each; run < (c + 1) * each; ++run) {
      total.dz += shared.runs[run].dz;
      total.product += shared.runs[run].product;
      total.x += shared.runs[run].x;
    }
    store_total(args, tile.sample, tile.channel + c, total);
  }
}

// Needs the coefficients of the channels in shared memory and the gradient of the group.
template <class T, int kPack, bool kKept>
__device__ __forceinline__ void write_x_grad(
    const GroupNormSilu& args, const Tiling& tiling, const Tile& tile, const Shared<T, kPack>& shared) {
  const int64_t first = first_element(args, tiling, tile);
  T* x_grad = static_cast<T*>(args.x_grad) + first;
  const int packs = tile.channels * (tile.positions / kPack);
  const Same<GroupGradient> group = {workspace_of(args).groups[tile.sample * args.groups + tile.group]};
  const auto write = [&](int i, const Pack<T, kPack>& xs, const Pack<T, kPack>& grads) {
    const Place place = place_of<kPack>(args, tiling, i);
    const Same<Channel> channel = {channel_at(shared.channels, tiling.channels, place.channel)};
    write_pack<T, kPack>(x_grad + place.offset, gradient(xs, grads, channel, group, args.silu));
  };
  if (kKept) {
    for (int i = threadIdx.x; i < packs; i += blockDim.x) write(i, shared.x[i], shared.y_grad[i]);
  } else {
    stream_pairs<T, kPack>(
        static_cast<const T*>(args.x) + first, static_cast<const T*>(args.y_grad) + first, threadIdx.x, packs,
        blockDim.x, [&](int i) { return place_of<kPack>(args, tiling, i).offset; }, write);
  }
}

template <class T, int kPack>
__global__ void __launch_bounds__(kBackwardThreadsAlone, 1) one_pass_kernel(GroupNormSilu args, Tiling tiling) {
  MD_DYNAMIC_SHARED(unsigned char, base);
  const Shared<T, kPack> shared(base, tiling);
  const Tile tile = tile_of(args, tiling, blockIdx.x);
  sum_tile<T, kPack>(args, tiling, tile, shared);
  __syncthreads();  // the totals are written
  if (threadIdx.x < kWarpSize) finish_group(args, tile.sample, tile.group);
  __syncthreads();
  write_x_grad<T, kPack, true>(args, tiling, tile, shared);
}

// Backwards, so that what was summed last is still in the L2 cache.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) x_grad_kernel(GroupNormSilu args, Tiling tiling) {
  MD_DYNAMIC_SHARED(unsigned char, base);
  const Shared<T, kPack> shared(base, tiling);
  const Tile tile = tile_of(args, tiling, int64_t(gridDim.x) - 1 - blockIdx.x);
  fill_channels(args, tile, shared.channels, tiling.channels);
  __syncthreads();
  write_x_grad<T, kPack, false>(args, tiling, tile, shared);
}

int pack_of(const GroupNormSilu& args, const Tiling& tiling) {
  return !tiling.packs ? 1 : args.dtype == Dtype::kFloat32 ? 4 : 8;
}

}  // namespace

int64_t parts_of_channel(const GroupNormSilu& args, const Tiling& tiling) {
  return tiling.channels_last ? tiling.position_tiles : runs_of(args, pack_of(args, tiling)).each;
}

void backward_in_one_pass_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    const size_t runs = size_t(tiling.channels) * runs_in_tile(tiling, tiling.threads);
    const size_t bytes = tiling.kept_bytes + channel_bytes(tiling) + runs * sizeof(Sums);
    MD_ALLOW_SHARED((one_pass_kernel<T, kPack>), bytes);
    MD_LAUNCH((one_pass_kernel<T, kPack>), tiling.blocks(args.batch), tiling.threads, bytes, stream, args, tiling);
  });
}

void sum_parts_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    const Runs runs = runs_of(args, kPack);
    const int64_t blocks = ceil_divide(args.batch * args.channels * runs.each * runs.lanes, kThreads);
    MD_LAUNCH((sum_parts_kernel<T, kPack>), unsigned(blocks), kThreads, 0, stream, args, runs);
  });
}

void x_grad_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    MD_LAUNCH((x_grad_kernel<T, kPack>), tiling.blocks(args.batch), tiling.threads, channel_bytes(tiling), stream, args,
              tiling);
  });
}

}  // namespace megadiff::cuda::group_norm
