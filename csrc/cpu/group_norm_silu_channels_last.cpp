// GroupNorm-SiLU on (N, spatial, C): blocks of rows whose results are joined in their order, some samples at a time.
#include "cpu/group_norm_silu.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

// Rows of a block: their sums are kept in float32 before they join the others in float64.
constexpr int64_t kBlockRows = 128;
// Samples are taken together up to this many elements: they stay in the last-level cache from one pass to the next.
constexpr int64_t kWaveElements = 1 << 20;

MEGADIFF_INLINE int64_t num_blocks(const GroupNormSilu& args) { return (args.spatial + kBlockRows - 1) / kBlockRows; }

// Some rows of one sample, `start` elements from the start of x.
struct Block {
  int64_t sample, start, rows;
};

MEGADIFF_INLINE Block block_at(const GroupNormSilu& args, int64_t index) {
  const int64_t sample = index / num_blocks(args), first = index % num_blocks(args) * kBlockRows;
  const int64_t rows = args.spatial - first < kBlockRows ? args.spatial - first : kBlockRows;
  return {sample, (sample * args.spatial + first) * args.channels, rows};
}

// Calls f(begin, end) for the samples of each wave.
template <class F>
MEGADIFF_INLINE void for_waves(const GroupNormSilu& args, const F& f) {
  const int64_t samples = 1 + kWaveElements / (args.spatial * args.channels);
  for (int64_t begin = 0; begin < args.batch; begin += samples)
    f(begin, begin + samples < args.batch ? begin + samples : args.batch);
}

// Calls f(index, first) for the blocks of these samples, on the threads there are; `first` is a block that only this
// thread works on at this time.
template <class F>
MEGADIFF_INLINE void for_blocks(const GroupNormSilu& args, int64_t begin_sample, int64_t end_sample, const F& f) {
  const int64_t blocks = num_blocks(args), start = begin_sample * blocks;
  parallel_for(
      (end_sample - begin_sample) * blocks, 1 + kGrainElements / (kBlockRows * args.channels),
      [&](int64_t begin, int64_t end) {
        for (int64_t index = begin; index < end; ++index) f(start + index, start + begin);
        stream_fence();
      });
}

// Calls f(at, c, lanes) for all vectors of a block, `at` elements from its start and c from that of a row. Memory is walked
// from end to end: several rows or a part of all rows at a time would save reads of what belongs to a channel, but
// measured up to half as fast, because the processor no longer foresees the addresses.
template <class Lanes = Whole, class F>
MEGADIFF_INLINE void for_rows(const GroupNormSilu& args, const Block& block, const F& f) {
  for (int64_t row = 0; row < block.rows; ++row)
    for_vectors<Lanes>(args.channels, [&](int64_t c, auto lanes) MEGADIFF_INLINE_LAMBDA {
      f(row * args.channels + c, c, lanes);
    });
}

// ---- forward

// Sums of x - pivot and of its square over the rows of a block, for every channel; the pivots are the block's first row.
template <class T>
MEGADIFF_INLINE void sum_rows(const GroupNormSilu& args, const Block& block, float* sums, float* squares) {
  const T* x = static_cast<const T*>(args.x) + block.start;
  std::memset(sums, 0, size_t(padded_channels(args)) * sizeof(float));
  std::memset(squares, 0, size_t(padded_channels(args)) * sizeof(float));
  for_rows(args, block, [&](int64_t at, int64_t c, auto lanes) MEGADIFF_INLINE_LAMBDA {
    const Vec difference = lanes.load(x + at) - lanes.load(x + c);
    store_vec(sums + c, load_vec(sums + c) + difference);
    store_vec(squares + c, load_vec(squares + c) + difference * difference);
  });
}

// The moments of the groups of a block; `scratch` has room for two floats a channel.
template <class T>
MEGADIFF_INLINE void measure_block(const GroupNormSilu& args, const Block& block, Moments* groups, float* scratch) {
  const int64_t width = group_width(args);
  float *sums = scratch, *squares = scratch + padded_channels(args);
  sum_rows<T>(args, block, sums, squares);
  const T* pivots = static_cast<const T*>(args.x) + block.start;
  for (int64_t group = 0; group < args.groups; ++group) {
    groups[group] = {};
    for (int64_t c = group * width; c < (group + 1) * width; ++c) {
      const double offset =
          load_at(args.offset, args.param_dtype, block.sample * args.offset_stride + c, 0.0f);
      merge(&groups[group], moments_about(load(pivots[c]) + offset, double(block.rows), sums[c], squares[c]));
    }
  }
}

void join_blocks(const GroupNormSilu& args, int64_t sample, const Moments* moments) {
  const SampleChannels all = channels_of(args, sample);
  for (int64_t group = 0; group < args.groups; ++group) {
    Moments total;
    for (int64_t block = 0; block < num_blocks(args); ++block)
      merge(&total, moments[(sample * num_blocks(args) + block) * args.groups + group]);
    const float rstd = store_statistics(args, sample * args.groups + group, total);
    write_channels(args, all, sample, group, total.mean, rstd);
  }
}

template <class T, bool kSilu, class Lanes>
MEGADIFF_INLINE void apply_block(const GroupNormSilu& args, const Block& block) {
  const SampleChannels all = channels_of(args, block.sample);
  const T* x = static_cast<const T*>(args.x) + block.start;
  T* y = static_cast<T*>(args.y) + block.start;
  for_rows<Lanes>(args, block, [&](int64_t at, int64_t c, auto lanes) MEGADIFF_INLINE_LAMBDA {
    const Vec centered = lanes.load(x + at) - load_vec(all.center + c);
    lanes.store(y + at, activate<kSilu>(centered * load_vec(all.slope + c) + load_vec(all.intercept + c)));
  });
}

template <class T, bool kSilu, class Lanes>
void forward(const GroupNormSilu& args) {
  float* scratch = args.workspace + channels_workspace(args);
  auto* moments = reinterpret_cast<Moments*>(scratch + args.batch * num_blocks(args) * 2 * padded_channels(args));
  for_waves(args, [&](int64_t begin, int64_t end) {
    for_blocks(args, begin, end, [&](int64_t index, int64_t first) {
      // One scratch a thread, so that it stays in the cache.
      measure_block<T>(args, block_at(args, index), moments + index * args.groups,
                       scratch + first * 2 * padded_channels(args));
    });
    for (int64_t sample = begin; sample < end; ++sample) join_blocks(args, sample, moments);
    for_blocks(args, begin, end, [&](int64_t index, int64_t) { apply_block<T, kSilu, Lanes>(args, block_at(args, index)); });
  });
}

// ---- backward

// Three arrays of channels: sums over a block of dz, dz (x - center) and x - center.
constexpr int64_t kSums = 3;

template <class T, bool kSilu>
MEGADIFF_INLINE void sum_block(const GroupNormSilu& args, const Block& block, float* sums) {
  const SampleChannels all = channels_of(args, block.sample);
  const int64_t padded = padded_channels(args);
  const bool sums_x = args.offset_grad != nullptr;
  const T* x = static_cast<const T*>(args.x) + block.start;
  const T* y_grad = static_cast<const T*>(args.y_grad) + block.start;
  T* x_grad = static_cast<T*>(args.x_grad) + block.start;
  std::memset(sums, 0, size_t(kSums * padded) * sizeof(float));
  for_rows(args, block, [&](int64_t at, int64_t c, auto lanes) MEGADIFF_INLINE_LAMBDA {
    const Vec centered = lanes.load(x + at) - load_vec(all.center + c);
    const Vec z = centered * load_vec(all.slope + c) + load_vec(all.intercept + c);
    const Vec dz = lanes.load(y_grad + at) * activation_slope<kSilu>(z);
    if constexpr (kKeepsDz<T>) lanes.store(x_grad + at, dz);
    store_vec(sums + c, load_vec(sums + c) + dz);
    store_vec(sums + padded + c, load_vec(sums + padded + c) + dz * centered);
    if (sums_x) store_vec(sums + 2 * padded + c, load_vec(sums + 2 * padded + c) + centered);
  });
}

void join_sums(const GroupNormSilu& args, int64_t sample, const float* block_sums) {
  const SampleChannels all = channels_of(args, sample);
  const int64_t blocks = num_blocks(args), padded = padded_channels(args);
  for (int64_t c = 0; c < args.channels; ++c) {
    double dz = 0.0, dzx = 0.0, x = 0.0;
    for (int64_t index = sample * blocks; index < (sample + 1) * blocks; ++index) {
      const float* own = block_sums + index * kSums * padded + c;
      dz += own[0];
      dzx += own[padded];
      x += own[2 * padded];
    }
    all.dz[c] = float(dz);
    all.dzx[c] = float(dzx);
    all.x[c] = float(x);
  }
  for (int64_t group = 0; group < args.groups; ++group) group_gradients(args, all, sample, group);
}

template <class T, bool kSilu>
MEGADIFF_INLINE void finish_block(const GroupNormSilu& args, const Block& block) {
  const SampleChannels all = channels_of(args, block.sample);
  const T* x = static_cast<const T*>(args.x) + block.start;
  const T* y_grad = static_cast<const T*>(args.y_grad) + block.start;
  T* x_grad = static_cast<T*>(args.x_grad) + block.start;
  const T* source = kKeepsDz<T> ? x_grad : y_grad;
  for_rows(args, block, [&](int64_t at, int64_t c, auto lanes) MEGADIFF_INLINE_LAMBDA {
    const Vec centered = lanes.load(x + at) - load_vec(all.center + c), slope = load_vec(all.slope + c);
    Vec dz = lanes.load(source + at);
    if constexpr (!kKeepsDz<T>) dz *= activation_slope<kSilu>(centered * slope + load_vec(all.intercept + c));
    lanes.store(x_grad + at, dz * slope + (centered * load_vec(all.tilt + c) + load_vec(all.level + c)));
  });
}

void write_sample(const GroupNormSilu& args, int64_t sample) {
  for (int64_t group = 0; group < args.groups; ++group) {
    const int64_t index = sample * args.groups + group;
    write_channels(args, channels_of(args, sample), sample, group, args.mean[index], args.rstd[index]);
  }
}

template <class T, bool kSilu>
void backward(const GroupNormSilu& args) {
  float* block_sums = args.workspace + channels_workspace(args);
  for_waves(args, [&](int64_t begin, int64_t end) {
    for (int64_t sample = begin; sample < end; ++sample) write_sample(args, sample);
    for_blocks(args, begin, end, [&](int64_t index, int64_t) {
      sum_block<T, kSilu>(args, block_at(args, index), block_sums + index * kSums * padded_channels(args));
    });
    for (int64_t sample = begin; sample < end; ++sample) join_sums(args, sample, block_sums);
    for_blocks(args, begin, end, [&](int64_t index, int64_t) { finish_block<T, kSilu>(args, block_at(args, index)); });
  });
}

}  // namespace

// Two arrays of channels and the moments of the groups for every block.
int64_t channels_last_forward_workspace(const GroupNormSilu& args) {
  const int64_t moments = args.groups * int64_t(sizeof(Moments) / sizeof(float));
  return channels_workspace(args) + args.batch * num_blocks(args) * (2 * padded_channels(args) + moments);
}

int64_t channels_last_backward_workspace(const GroupNormSilu& args) {
  return channels_workspace(args) + args.batch * num_blocks(args) * kSums * padded_channels(args);
}

void forward_channels_last(const GroupNormSilu& args) {
  with_forward_kernel(args, args.channels, [&](auto type, auto silu, auto lanes) {
    forward<typename decltype(type)::type, decltype(silu)::value, decltype(lanes)>(args);
  });
}

void backward_channels_last(const GroupNormSilu& args) {
  with_kernel(args, [&](auto type, auto silu) { backward<typename decltype(type)::type, decltype(silu)::value>(args); });
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
