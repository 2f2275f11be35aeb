// How GroupNorm-SiLU cuts its tensor into tiles, one a block: some channels at some positions of one sample. In one
// pass a tile holds whole groups and stays in shared memory; else tiles leave partial results for a launch to join.
#pragma once

#include "common/group_norm_silu.h"
#include "cuda/rows.h"

namespace megadiff::cuda::group_norm {

constexpr int kThreads = 256;
// Of a block whose shared memory leaves no room for a second one. More in backward would spill registers.
constexpr int kForwardThreadsAlone = 512, kBackwardThreadsAlone = 384;

// n / divisor as a multiplication, for n < 2^31 (Granlund and Montgomery 1994).
struct Divider {
  unsigned multiplier = 1, shift = 0;

  Divider() = default;
  explicit Divider(unsigned divisor) {
    while ((uint64_t(1) << shift) < divisor) ++shift;
    multiplier = unsigned((((uint64_t(1) << shift) - divisor) << 32) / divisor + 1);
  }
  __device__ __forceinline__ unsigned divide(unsigned n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

struct Tiling {
  bool channels_last;  // also where there is one position, for then the layouts are the same
  bool one_pass, packs;  // packs: 16 bytes at a time
  int threads;
  int channels;    // of a tile: whole groups, or a part of one where `pieces` > 1
  int positions;   // of a tile: all, unless two passes are made
  int pieces;      // tiles that share the channels of a group
  int64_t channel_tiles, position_tiles;
  Divider by_width;      // divides by the channels of a group
  Divider by_positions;  // divides by the vectors of a tile's channel
  size_t kept_bytes;     // what a tile in one pass keeps in shared memory

  unsigned blocks(int64_t batch) const { return unsigned(batch * channel_tiles * position_tiles); }
};

// `streams` tensors are read and, in one pass, kept: x, or x and y_grad. The same for the same sizes and alignments.
Tiling tiling_of(const GroupNormSilu& args, int streams);

struct Tile {
  int64_t sample, channel, position, group;  // the first ones
  int channels, positions, groups;
  int64_t piece, position_tile;
};

__device__ __forceinline__ int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Tiles that are neighbours in memory are neighbours in time.
__device__ __forceinline__ Tile tile_of(const GroupNormSilu& args, const Tiling& tiling, int64_t index) {
  const int64_t in_sample = tiling.channel_tiles * tiling.position_tiles, at = index % in_sample;
  const int64_t channel_tile = tiling.channels_last ? at % tiling.channel_tiles : at / tiling.position_tiles;
  const int64_t width = args.channels / args.groups;
  Tile tile;
  tile.sample = index / in_sample;
  tile.position_tile = tiling.channels_last ? at / tiling.channel_tiles : at % tiling.position_tiles;
  tile.piece = channel_tile % tiling.pieces;
  const int64_t whole = tiling.pieces > 1 ? width : tiling.channels;  // channels from one run of pieces to the next
  const int64_t start = channel_tile / tiling.pieces * whole;
  tile.channel = start + tile.piece * tiling.channels;
  tile.channels = int(smaller(tiling.channels, smaller(start + whole, args.channels) - tile.channel));
  tile.position = tile.position_tile * tiling.positions;
  tile.positions = int(smaller(tiling.positions, args.spatial - tile.position));
  tile.group = tile.channel / width;
  tile.groups = tiling.pieces > 1 ? 1 : int(tile.channels / width);
  return tile;
}

// The offset in x of a tile's first element.
__device__ __forceinline__ int64_t first_element(const GroupNormSilu& args, const Tiling& tiling, const Tile& tile) {
  if (tiling.channels_last) return (tile.sample * args.spatial + tile.position) * args.channels + tile.channel;
  return (tile.sample * args.channels + tile.channel) * args.spatial + tile.position;
}

// Pack i of a channels-first tile: its channel within the tile and its offset from the tile's first element.
struct Place {
  int channel;
  int64_t offset;
};

template <int kPack>
__device__ __forceinline__ Place place_of(const GroupNormSilu& args, const Tiling& tiling, int i) {
  const int channel = int(tiling.by_positions.divide(unsigned(i)));
  return {channel, channel * (args.spatial - tiling.positions) + int64_t(i) * kPack};
}

// A channels-last tile is walked down in columns of one pack; `rows` columns of threads take turns at the positions.
struct Column {
  int column, row, rows;
  bool works;
};

template <int kPack>
__device__ __forceinline__ Column column_of(const Tiling& tiling, const Tile& tile) {
  const int width = tiling.channels / kPack, thread = threadIdx.x;
  Column own;
  own.rows = int(blockDim.x) / width;
  own.row = thread / width;
  own.column = thread % width;
  own.works = own.row < own.rows && own.column * kPack < tile.channels;
  return own;
}

// Calls f(Type<T>{}, packs) with the element type and, as a constant, the elements read at once.
template <class F>
void with_packs(const GroupNormSilu& args, const Tiling& tiling, const F& f) {
  with_type(args.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (tiling.packs)
      f(type, std::integral_constant<int, 16 / int(sizeof(T))>{});
    else
      f(type, std::integral_constant<int, 1>{});
  });
}

}  // namespace megadiff::cuda::group_norm
