// GroupNorm-SiLU forward, channels last: the threads of a tile stand in columns of one pack of channels and walk down
// the positions, so that neighbours read neighbouring channels.
#include "cuda/group_norm_silu.h"
#include "cuda/group_norm_silu_launches.h"

namespace megadiff::cuda::group_norm {
namespace {

struct Moment {
  float mean, squares;
};

// Shared memory: the kept packs (in one pass), then three floats a channel, then a moment a channel and row of threads.
template <class T, int kPack>
struct Shared {
  Pack<T, kPack>* kept;
  float* channels;
  Moment* moments;

  __device__ __forceinline__ Shared(unsigned char* base, const Tiling& tiling)
      : kept(reinterpret_cast<Pack<T, kPack>*>(base)), channels(reinterpret_cast<float*>(base + tiling.kept_bytes)),
        moments(reinterpret_cast<Moment*>(channels + 3 * tiling.channels)) {}
};

size_t channel_bytes(const Tiling& tiling) { return 3 * sizeof(float) * tiling.channels; }

// A row of threads has tiling.channels / pack of them.
size_t moment_bytes(const Tiling& tiling, int pack) {
  return sizeof(Moment) * tiling.channels * (tiling.threads / (tiling.channels / pack));
}

// Merges the moments of each group of the tile: those of its channels and of each row of threads.
template <int kPack>
__device__ __forceinline__ void merge_rows(
    const GroupNormSilu& args, const Tiling& tiling, const Tile& tile, const Moment* moments) {
  const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int width = tile.channels / tile.groups, rows = int(blockDim.x) / (tiling.channels / kPack);
  const int each = tile.positions / rows, more = tile.positions % rows;  // the first rows have one position more
  for (int group = warp; group < tile.groups; group += warps) {
    const Moments joined = merge(rows * width, [&](int i) {
      const int row = tiling.pieces > 1 ? i / width : int(tiling.by_width.divide(unsigned(i)));
      const Moment moment = moments[row * tiling.channels + group * width + (i - row * width)];
      return Moments{float(row < more ? each + 1 : each), moment.mean, moment.squares};
    });
    if (threadIdx.x % kWarpSize == 0) store_moments(args, tiling, tile, group, joined);
  }
}

// The moments of the channels of a thread, over its positions.
template <class T, int kPack, bool kKeep>
__device__ __forceinline__ void measure_own(
    const GroupNormSilu& args, const Tiling& tiling, const Tile& tile, const Column& own,
    const Shared<T, kPack>& shared, Moment* moments) {
  const T* x = static_cast<const T*>(args.x) + first_element(args, tiling, tile) + own.column * kPack;
  const int width = tiling.channels / kPack;
  float count = 0.0f, pivot[kPack] = {}, sum[kPack] = {}, squares[kPack] = {};
  if (own.row < tile.positions) {
    const Pack<T, kPack> first = read_pack<T, kPack>(x + own.row * args.channels);
#pragma unroll
    for (int j = 0; j < kPack; ++j) pivot[j] = load(first.at[j]);
  }
  stream<T, kPack>(
      own.row, tile.positions, own.rows, [&](int row) { return x + row * args.channels; },
      [&](int row, const Pack<T, kPack>& pack) {
        if (kKeep) shared.kept[row * width + own.column] = pack;
        count += 1.0f;
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          const float difference = load(pack.at[j]) - pivot[j];
          sum[j] += difference;
          squares[j] += difference * difference;
        }
      });
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const float offset = shared.channels[own.column * kPack + j];
    const Moments own_moments = about_pivot(count > 0.0f ? count : 1.0f, pivot[j] + offset, sum[j], squares[j]);
    moments[j] = {own_moments.mean, own_moments.squares};
  }
}

// Stores the moments of a tile; between barriers, as it reads and writes shared memory.
template <class T, int kPack, bool kKeep>
__device__ __forceinline__ void measure(
    const GroupNormSilu& args, const Tiling& tiling, const Tile& tile, const Shared<T, kPack>& shared) {
  const Column own = column_of<kPack>(tiling, tile);
  fill_offsets(args, tile, shared.channels);
  __syncthreads();
  if (own.works) {
    Moment* moments = shared.moments + own.row * tiling.channels + own.column * kPack;
    measure_own<T, kPack, kKeep>(args, tiling, tile, own, shared, moments);
  }
  __syncthreads();
  merge_rows<kPack>(args, tiling, tile, shared.moments);
}

template <class T, int kPack, bool kKept>
__device__ __forceinline__ void activate(
    const GroupNormSilu& args, const Tiling& tiling, const Tile& tile, const Shared<T, kPack>& shared) {
  const Column own = column_of<kPack>(tiling, tile);
  const int64_t first = first_element(args, tiling, tile) + own.column * kPack;
  const T* x = static_cast<const T*>(args.x) + first;
  T* y = static_cast<T*>(args.y) + first;
  const int width = tiling.channels / kPack;
  fill_channels(args, tile, shared.channels, tiling.channels);
  __syncthreads();
  if (own.works) {
    Channel channels[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) channels[j] = channel_at(shared.channels, tiling.channels, own.column * kPack + j);
    const auto write = [&](int row, const Pack<T, kPack>& pack) {
      write_pack<T, kPack>(y + row * args.channels, activated(pack, channels, args.silu));
    };
    if (kKept) {
      for (int row = own.row; row < tile.positions; row += own.rows) write(row, shared.kept[row * width + own.column]);
    } else {
      stream<T, kPack>(own.row, tile.positions, own.rows, [&](int row) { return x + row * args.channels; }, write);
    }
  }
}

template <class T, int kPack>
__global__ void __launch_bounds__(kForwardThreadsAlone, 1) one_pass_kernel(GroupNormSilu args, Tiling tiling) {
  MD_DYNAMIC_SHARED(unsigned char, base);
  const Shared<T, kPack> shared(base, tiling);
  const Tile tile = tile_of(args, tiling, blockIdx.x);
  measure<T, kPack, true>(args, tiling, tile, shared);
  __syncthreads();  // the statistics of this block's groups are written
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

void forward_in_one_pass_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    const size_t bytes = tiling.kept_bytes + channel_bytes(tiling) + moment_bytes(tiling, kPack);
    MD_ALLOW_SHARED((one_pass_kernel<T, kPack>), bytes);
    MD_LAUNCH((one_pass_kernel<T, kPack>), tiling.blocks(args.batch), tiling.threads, bytes, stream, args, tiling);
  });
}

void measure_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    const size_t bytes = channel_bytes(tiling) + moment_bytes(tiling, kPack);
    MD_LAUNCH((measure_kernel<T, kPack>), tiling.blocks(args.batch), tiling.threads, bytes, stream, args, tiling);
  });
}

void activate_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  with_packs(args, tiling, [&](auto type, auto packs) {
    using T = typename decltype(type)::type;
    constexpr int kPack = decltype(packs)::value;
    MD_LAUNCH((activate_kernel<T, kPack>), tiling.blocks(args.batch), tiling.threads, channel_bytes(tiling), stream,
              args, tiling);
  });
}

}  // namespace megadiff::cuda::group_norm
