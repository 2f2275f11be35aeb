// GroupNorm-SiLU forward, channels first: a tile is a run of packs, channel after channel, shared evenly by threads.
#include "cuda/group_norm_silu.h"
#include "cuda/group_norm_silu_launches.h"

namespace megadiff::cuda::group_norm {
namespace {

// Shared memory: the kept packs (in one pass), then a float or three for each channel, then a moment for each thread.
template <class T, int kPack>
struct Shared {
  Pack<T, kPack>* kept;
  float* channels;
  Moments* moments;

  __device__ __forceinline__ Shared(unsigned char* base, const Tiling& tiling)
      : kept(reinterpret_cast<Pack<T, kPack>*>(base)), channels(reinterpret_cast<float*>(base + tiling.kept_bytes)),
        moments(reinterpret_cast<Moments*>(channels + 3 * tiling.channels)) {}
};

size_t channel_bytes(const Tiling& tiling) { return 3 * sizeof(float) * tiling.channels; }
size_t moment_bytes(const Tiling& tiling) { return sizeof(Moments) * tiling.threads; }

// The moments of a thread's packs.
template <class T, int kPack, bool kKeep>
__device__ __forceinline__ Moments measure_own(
    const GroupNormSilu& args, const Tiling& tiling, const T* x, int packs, const Shared<T, kPack>& shared) {
  if (int(threadIdx.x) >= packs) return {};
  const Place first = place_of<kPack>(args, tiling, threadIdx.x);
  const float pivot = load(x[first.offset]) + shared.channels[first.channel];
  float count = 0.0f, sum[kPack] = {}, squares[kPack] = {};
  stream<T, kPack>(
      threadIdx.x, packs, blockDim.x, [&](int i) { return x + place_of<kPack>(args, tiling, i).offset; },
      [&](int i, const Pack<T, kPack>& pack) {
        if (kKeep) shared.kept[i] = pack;
        const float shift = shared.channels[place_of<kPack>(args, tiling, i).channel] - pivot;
        count += kPack;
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          const float difference = load(pack.at[j]) + shift;
          sum[j] += difference;
          squares[j] += difference * difference;
        }
      });
  for (int j = 1; j < kPack; ++j) {
    sum[0] += sum[j];
    squares[0] += squares[j];
  }
  return about_pivot(count, pivot, sum[0], squares[0]);
}

// Stores the moments of a tile; between barriers, as it reads and writes shared memory.
template <class T, int kPack, bool kKeep>
__device__ __forceinline__ void measure(
    const GroupNormSilu& args, const Tiling& tiling, const Tile& tile, const Shared<T, kPack>& shared) {
  const T* x = static_cast<const T*>(args.x) + first_element(args, tiling, tile);
  const int packs = tile.channels * (tile.positions / kPack);
  fill_offsets(args, tile, shared.channels);
  __syncthreads();
  shared.moments[threadIdx.x] = measure_own<T, kPack, kKeep>(args, tiling, x, packs, shared);
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    const Moments moments = merge(int(blockDim.x), [&](int i) { return shared.moments[i]; });
    if (threadIdx.x == 0) store_moments(args, tiling, tile, 0, moments);
  }
}

template <class T, int kPack, bool kKept>
__device__ __forceinline__ void activate(
    const GroupNormSilu& args, const Tiling& tiling, const Tile& tile, const Shared<T, kPack>& shared) {
  const int64_t first = first_element(args, tiling, tile);
  const T* x = static_cast<const T*>(args.x) + first;
  T* y = static_cast<T*>(args.y) + first;
  const int packs = tile.channels * (tile.positions / kPack);
  fill_channels(args, tile, shared.channels, tiling.channels);
  __syncthreads();
  const auto write = [&](int i, const Pack<T, kPack>& pack) {
    const Place place = place_of<kPack>(args, tiling, i);
    const Same<Channel> channel = {channel_at(shared.channels, tiling.channels, place.channel)};
    write_pack<T, kPack>(y + place.offset, activated(pack, channel, args.silu));
  };
  if (kKept) {
    for (int i = threadIdx.x; i < packs; i += blockDim.x) write(i, shared.kept[i]);
  } else {
    stream<T, kPack>(
        threadIdx.x, packs, blockDim.x, [&](int i) { return x + place_of<kPack>(args, tiling, i).offset; }, write);
  }
}

template <class T, int kPack>
__global__ void __launch_bounds__(kForwardThreadsAlone, 1) one_pass_kernel(GroupNormSilu args, Tiling tiling) {
  MD_DYNAMIC_SHARED(unsigned char, base);
  const Shared<T, kPack> shared(base, tiling);
  const Tile tile = tile_of(args, tiling, blockIdx.x);
  measure<T, kPack, true>(args, tiling, tile, shared);
  __syncthreads();  // the statistics of this block's group are written
  activate<T, kPack, true>(args, tiling, tile, shared);
}

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads, 3) measure_kernel(GroupNormSilu args, Tiling tiling) {
  MD_DYNAMIC_SHARED(unsigned char, base);
  measure<T, kPack, false>(args, tiling, tile_of(args, tiling, blockIdx.x), Shared<T, kPack>(base, tiling));
}

// Backwards, so that the tiles that were measured last are still in the L2 cache.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) activate_kernel(GroupNormSilu args, Tiling tiling) {
  MD_DYNAMIC_SHARED(unsigned char, base);
  const Tile tile = tile_of(args, tiling, int64_t(gridDim.x) - 1 - blockIdx.x);
  activate<T, kPack, false>(args, tiling, tile, Shared<T, kPack>(base, tiling));
}

}  // namespace

void forward_in_one_pass_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    const size_t bytes = tiling.kept_bytes + channel_bytes(tiling) + moment_bytes(tiling);
    MD_ALLOW_SHARED((one_pass_kernel<T, kPack>), bytes);
    MD_LAUNCH((one_pass_kernel<T, kPack>), tiling.blocks(args.batch), tiling.threads, bytes, stream, args, tiling);
  });
}

void measure_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    const size_t bytes = channel_bytes(tiling) + moment_bytes(tiling);
    MD_LAUNCH((measure_kernel<T, kPack>), tiling.blocks(args.batch), tiling.threads, bytes, stream, args, tiling);
  });
}

void activate_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    MD_LAUNCH((activate_kernel<T, kPack>), tiling.blocks(args.batch), tiling.threads, channel_bytes(tiling), stream,
              args, tiling);
  });
}

}  // namespace megadiff::cuda::group_norm
