// Chooses the tiles of GroupNorm-SiLU. By sizes and alignments only, so that results don't depend on the device.
#include "cuda/group_norm_silu_tiling.h"

namespace megadiff::cuda::group_norm {
namespace {

// What a block can have on an A100 is 163 KiB.
constexpr int64_t kMostShared = 160 * 1024;
// One pass on fewer blocks than multiprocessors (108 on an A100) wastes bandwidth, unless a tile is soon done.
constexpr int64_t kEnoughBlocks = 108, kSoonDone = 32 * 1024;
// Tiles above this leave room for one block on a multiprocessor, which then needs more threads.
constexpr int64_t kAlone = 48 * 1024;
// Two passes: tiles as large as gives every multiprocessor several, and a group no more than can be merged quickly.
constexpr int64_t kTilesWanted = 512, kSmallestTile = 8 * 1024, kLargestTile = 64 * 1024, kMostParts = 1024;
constexpr int64_t kMostChannels = 512;
// Memory is moved in sectors; a row of a channels-last tile should waste little of them and be this long in two passes.
constexpr int64_t kSector = 32, kLongRow = 128;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t greatest_divisor(int64_t a, int64_t b) { return b == 0 ? a : greatest_divisor(b, a % b); }

struct Shape {
  int64_t size, pack, width, streams;  // bytes an element, elements a pack, channels a group, tensors that are read
  int64_t bytes() const { return size * streams; }
};

bool can_take_packs(const GroupNormSilu& args, bool channels_last, int64_t size) {
  uintptr_t bits = uintptr_t(channels_last ? args.channels : args.spatial) * uintptr_t(size);
  const void* const written[] = {args.y, args.x_grad};
  for (const void* pointer : {args.x, args.y_grad, written[0], written[1]})
    bits |= reinterpret_cast<uintptr_t>(pointer);
  if (bits % 16 != 0) return false;
  // Channels last, whole groups that are whole packs must fit the threads of a block, or a group be whole packs itself.
  const int64_t pack = 16 / size, width = args.channels / args.groups;
  const int64_t both = width / greatest_divisor(width, pack) * pack;
  return !channels_last || width % pack == 0 || least(both, args.channels) <= kThreads * pack;
}

// A row of so many channels, at any multiple of its length, touches at most a quarter more than it holds.
bool fills_sectors(int64_t bytes) { return 4 * (bytes + kSector - greatest_divisor(bytes, kSector)) <= 5 * bytes; }

// The narrowest strip of whole groups and packs whose rows fill sectors and are at least so long; 0 where none is.
int64_t strip_of(const GroupNormSilu& args, const Shape& shape, int64_t row_bytes) {
  const int64_t unit = shape.width / greatest_divisor(shape.width, shape.pack) * shape.pack;
  const int64_t limit = least(args.channels, kThreads * shape.pack);
  int64_t widest = 0;
  for (int64_t strip = least(unit, args.channels); strip <= limit; strip += unit) {
    widest = strip;
    if (strip * shape.size >= row_bytes && fills_sectors(strip * shape.size)) return strip;
  }
  return args.channels <= limit ? args.channels : widest;
}

void set_channels(const GroupNormSilu& args, const Shape& shape, int64_t channels, Tiling* tiling) {
  tiling->channels = int(channels);
  tiling->pieces = int(ceil_divide(shape.width, channels));
  tiling->channel_tiles =
      tiling->pieces > 1 ? args.groups * tiling->pieces : ceil_divide(args.channels, channels);
}

void set_positions(const GroupNormSilu& args, int64_t positions, Tiling* tiling) {
  tiling->positions = int(positions);
  tiling->position_tiles = ceil_divide(args.spatial, positions);
}

// Shared memory beside the kept packs, at most.
int64_t scratch_bytes(const Shape& shape, const Tiling& tiling) {
  const int64_t each_thread = tiling.channels_last ? most(12, 8 * shape.pack) : 12;
  return 24 * int64_t(tiling.channels) + each_thread * tiling.threads;
}

// Makes tiles of whole groups at all positions; false where these are too large, or too few.
bool fit_one_pass(const GroupNormSilu& args, const Shape& shape, int64_t channels, Tiling* tiling) {
  if (channels == 0 || args.spatial > kMostShared) return false;
  const int64_t kept = ceil_divide(channels * args.spatial * shape.bytes(), 32) * 32;  // 16 for each stream
  tiling->threads = kept <= kAlone ? kThreads : shape.streams == 1 ? kForwardThreadsAlone : kBackwardThreadsAlone;
  set_channels(args, shape, channels, tiling);
  set_positions(args, args.spatial, tiling);
  tiling->kept_bytes = size_t(kept);
  tiling->one_pass = kept + scratch_bytes(shape, *tiling) <= kMostShared &&
                     (tiling->blocks(args.batch) >= kEnoughBlocks || kept <= kSoonDone);
  return tiling->one_pass;
}

void make_two_passes(const GroupNormSilu& args, const Shape& shape, Tiling* tiling) {
  tiling->threads = kThreads;
  tiling->kept_bytes = 0;
  const int64_t group_bytes = shape.width * args.spatial * shape.size;
  const int64_t all_bytes = args.batch * args.groups * group_bytes;
  int64_t bytes = least(most(all_bytes / kTilesWanted, kSmallestTile), kLargestTile);
  bytes = most(bytes, group_bytes / kMostParts);
  if (tiling->channels_last) {
    const int64_t strip = strip_of(args, shape, kLongRow);
    set_channels(args, shape, strip > 0 ? strip : least(shape.width, kThreads * shape.pack), tiling);
    const int64_t rows = kThreads / (tiling->channels / shape.pack);
    const int64_t wanted = most(bytes / (tiling->channels * shape.size), args.spatial / kMostParts);
    set_positions(args, most(ceil_divide(wanted, rows), 1) * rows, tiling);
  } else if (args.spatial * shape.size > bytes) {  // parts of channels
    set_channels(args, shape, 1, tiling);
    const int64_t wanted = ceil_divide(args.spatial, ceil_divide(args.spatial * shape.size, bytes));
    set_positions(args, ceil_divide(wanted, kWarpSize * shape.pack) * kWarpSize * shape.pack, tiling);
  } else {  // whole channels, shared evenly
    const int64_t fitting = least(bytes / (args.spatial * shape.size), kMostChannels);
    set_channels(args, shape, ceil_divide(shape.width, ceil_divide(shape.width, fitting)), tiling);
    set_positions(args, args.spatial, tiling);
  }
}

}  // namespace

Tiling tiling_of(const GroupNormSilu& args, int streams) {
  const int64_t size = args.dtype == Dtype::kFloat32 ? 4 : 2;
  Tiling tiling = {};
  tiling.channels_last = args.channels_last || args.spatial == 1;
  tiling.packs = can_take_packs(args, tiling.channels_last, size);
  const Shape shape = {size, tiling.packs ? 16 / size : 1, args.channels / args.groups, streams};
  const bool one_pass = tiling.channels_last
                            ? fit_one_pass(args, shape, strip_of(args, shape, kLongRow), &tiling) ||
                                  fit_one_pass(args, shape, strip_of(args, shape, 0), &tiling)
                            : fit_one_pass(args, shape, shape.width, &tiling);
  if (!one_pass) make_two_passes(args, shape, &tiling);
  tiling.by_width = Divider(unsigned(shape.width));
  if (!tiling.channels_last) tiling.by_positions = Divider(unsigned(tiling.positions / shape.pack));
  return tiling;
}

}  // namespace megadiff::cuda::group_norm
