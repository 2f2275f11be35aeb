// GroupNorm-SiLU backward, channels last: threads in columns of one pack of channels, as in forward.
#include "cuda/group_norm_silu_launches.h"
#include "cuda/group_norm_silu_sums.h"

namespace megadiff::cuda::group_norm {
namespace {

// Shared memory: the kept packs of x and y_grad (in one pass), then three floats and three sums a channel, then one sum
// a channel and row of threads.
template <class T, int kPack>
struct Shared {
  Pack<T, kPack>*x, *y_grad;
  float *channels, *sums, *rows;

  __device__ __forceinline__ Shared(unsigned char* base, const Tiling& tiling)
      : x(reinterpret_cast<Pack<T, kPack>*>(base)),
        y_grad(reinterpret_cast<Pack<T, kPack>*>(base + tiling.kept_bytes / 2)),
        channels(reinterpret_cast<float*>(base + tiling.kept_bytes)), sums(channels + 3 * tiling.channels),
        rows(sums + kSums * tiling.channels) {}
};

size_t channel_bytes(const Tiling& tiling) { return 3 * sizeof(float) * tiling.channels; }

// A row of threads has tiling.channels / pack of them.
size_t sum_bytes(const Tiling& tiling, int pack) {
  return sizeof(float) * tiling.channels * (kSums + tiling.threads / (tiling.channels / pack));
}

// sums[c] = the sum of `values` over the rows of threads; two barriers.
template <int kPack>
__device__ __forceinline__ void sum_rows(
    const Tiling& tiling, const Tile& tile, const Column& own, const float (&values)[kPack], float* rows, float* sums) {
  if (own.works) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) rows[own.row * tiling.channels + own.column * kPack + j] = values[j];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < tile.channels; c += blockDim.x) {
    float sum = 0.0f;
    for (int row = 0; row < own.rows; ++row) sum += rows[row * tiling.channels + c];
    sums[c] = sum;
  }
  __syncthreads();
}

// Leaves the sums of the tile's channels in shared memory.
template <class T, int kPack, bool kKeep>
__device__ __forceinline__ void sum_tile(
    const GroupNormSilu& args, const Tiling& tiling, const Tile& tile, const Shared<T, kPack>& shared) {
  const Column own = column_of<kPack>(tiling, tile);
  const int64_t first = first_element(args, tiling, tile) + own.column * kPack;
  const int width = tiling.channels / kPack;
  fill_channels(args, tile, shared.channels, tiling.channels);
  __syncthreads();
  float sum[kPack] = {}, product[kPack] = {}, x_sum[kPack] = {};
  if (own.works) {
    Channel channels[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) channels[j] = channel_at(shared.channels, tiling.channels, own.column * kPack + j);
    stream_pairs<T, kPack>(
        static_cast<const T*>(args.x) + first, static_cast<const T*>(args.y_grad) + first, own.row, tile.positions,
        own.rows, [&](int row) { return row * args.channels; },
        [&](int row, const Pack<T, kPack>& xs, const Pack<T, kPack>& grads) {
          if (kKeep) {
            shared.x[row * width + own.column] = xs;
            shared.y_grad[row * width + own.column] = grads;
          }
          float dz[kPack], centered[kPack];
          differentiate(xs, grads, channels, args.silu, dz, centered);
#pragma unroll
          for (int j = 0; j < kPack; ++j) {
            sum[j] += dz[j];
            product[j] += dz[j] * centered[j];
            x_sum[j] += centered[j];
          }
        });
  }
  sum_rows(tiling, tile, own, sum, shared.rows, shared.sums);
  sum_rows(tiling, tile, own, product, shared.rows, shared.sums + tiling.channels);
  sum_rows(tiling, tile, own, x_sum, shared.rows, shared.sums + 2 * tiling.channels);
}

__device__ __forceinline__ Sums sums_at(const float* sums, const Tiling& tiling, int c) {
  return {sums[c], sums[tiling.channels + c], sums[2 * tiling.channels + c]};
}

// Needs the coefficients of the channels in shared memory and the gradients of the groups.
template <class T, int kPack, bool kKept>
__device__ __forceinline__ void write_x_grad(
    const GroupNormSilu& args, const Tiling& tiling, const Tile& tile, const Shared<T, kPack>& shared) {
  const Column own = column_of<kPack>(tiling, tile);
  const int64_t first = first_element(args, tiling, tile) + own.column * kPack;
  const int width = tiling.channels / kPack;
  if (own.works) {
    Channel channels[kPack];
    GroupGradient groups[kPack];
    const GroupGradient* of_sample = workspace_of(args).groups + tile.sample * args.groups + tile.group;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const int c = own.column * kPack + j;
      channels[j] = channel_at(shared.channels, tiling.channels, c);
      groups[j] = of_sample[tiling.pieces > 1 ? 0u : tiling.by_width.divide(unsigned(c))];
    }
    const auto write = [&](int row, const Pack<T, kPack>& xs, const Pack<T, kPack>& grads) {
      T* to = static_cast<T*>(args.x_grad) + first + row * args.channels;
      write_pack<T, kPack>(to, gradient(xs, grads, channels, groups, args.silu));
    };
    if (kKept) {
      for (int row = own.row; row < tile.positions; row += own.rows)
        write(row, shared.x[row * width + own.column], shared.y_grad[row * width + own.column]);
    } else {
      stream_pairs<T, kPack>(
          static_cast<const T*>(args.x) + first, static_cast<const T*>(args.y_grad) + first, own.row, tile.positions,
          own.rows, [&](int row) { return row * args.channels; }, write);
    }
  }
}

template <class T, int kPack>
__global__ void __launch_bounds__(kBackwardThreadsAlone, 1) one_pass_kernel(GroupNormSilu args, Tiling tiling) {
  MD_DYNAMIC_SHARED(unsigned char, base);
  const Shared<T, kPack> shared(base, tiling);
  const Tile tile = tile_of(args, tiling, blockIdx.x);
  sum_tile<T, kPack, true>(args, tiling, tile, shared);
  for (int c = threadIdx.x; c < tile.channels; c += blockDim.x)
    store_total(args, tile.sample, tile.channel + c, sums_at(shared.sums, tiling, c));
  __syncthreads();
  for (int group = threadIdx.x / kWarpSize; group < tile.groups; group += blockDim.x / kWarpSize)
    finish_group(args, tile.sample, tile.group + group);
  __syncthreads();
  write_x_grad<T, kPack, true>(args, tiling, tile, shared);
}

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) sum_parts_kernel(GroupNormSilu args, Tiling tiling) {
  MD_DYNAMIC_SHARED(unsigned char, base);
  const Shared<T, kPack> shared(base, tiling);
  const Tile tile = tile_of(args, tiling, blockIdx.x);
  sum_tile<T, kPack, false>(args, tiling, tile, shared);
  for (int c = threadIdx.x; c < tile.channels; c += blockDim.x)
    store_part(args, tile.sample, tile.channel + c, tiling.position_tiles, tile.position_tile,
               sums_at(shared.sums, tiling, c));
}

// Backwards, so that the tiles that were summed last are still in the L2 cache.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) x_grad_kernel(GroupNormSilu args, Tiling tiling) {
  MD_DYNAMIC_SHARED(unsigned char, base);
  const Shared<T, kPack> shared(base, tiling);
  const Tile tile = tile_of(args, tiling, int64_t(gridDim.x) - 1 - blockIdx.x);
  fill_channels(args, tile, shared.channels, tiling.channels);
  __syncthreads();
  write_x_grad<T, kPack, false>(args, tiling, tile, shared);
}

}  // namespace

void backward_in_one_pass_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    const size_t bytes = tiling.kept_bytes + channel_bytes(tiling) + sum_bytes(tiling, kPack);
    MD_ALLOW_SHARED((one_pass_kernel<T, kPack>), bytes);
    MD_LAUNCH((one_pass_kernel<T, kPack>), tiling.blocks(args.batch), tiling.threads, bytes, stream, args, tiling);
  });
}

void sum_parts_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    const size_t bytes = channel_bytes(tiling) + sum_bytes(tiling, kPack);
    MD_ALLOW_SHARED((sum_parts_kernel<T, kPack>), bytes);
    MD_LAUNCH((sum_parts_kernel<T, kPack>), tiling.blocks(args.batch), tiling.threads, bytes, stream, args, tiling);
  });
}

void x_grad_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    MD_LAUNCH((x_grad_kernel<T, kPack>), tiling.blocks(args.batch), tiling.threads, channel_bytes(tiling), stream, args,
              tiling);
  });
}

}  // namespace megadiff::cuda::group_norm
