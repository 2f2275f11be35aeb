// GroupNorm-SiLU on (N, spatial, C): blocks of rows that stay in the cache, whose results are joined in their order.
#include "cpu/group_norm_silu.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

// Elements of a block of rows: the second look at it finds it in the second-level cache.
constexpr int64_t kBlockElements = 16384;
// Rows that are added to the sums of the channels at once, so that the sums are read and written less often.
constexpr int64_t kRows = 4;

MEGADIFF_INLINE int64_t block_rows(const GroupNormSilu& args) {
  const int64_t rows = kBlockElements / args.channels;
  return rows < kRows ? kRows : rows;
}

MEGADIFF_INLINE int64_t num_blocks(const GroupNormSilu& args) {
  return (args.spatial + block_rows(args) - 1) / block_rows(args);
}

// The channels padded to whole vectors, so that per-channel arrays are read and written in vectors only.
MEGADIFF_INLINE int64_t padded_channels(const GroupNormSilu& args) {
  return (args.channels + kLanes - 1) / kLanes * kLanes;
}

// Rows [start, stop) of one sample.
struct Block {
  int64_t sample, start, stop;
};

MEGADIFF_INLINE Block block_at(const GroupNormSilu& args, int64_t index) {
  const int64_t blocks = num_blocks(args), rows = block_rows(args);
  const int64_t start = index % blocks * rows;
  return {index / blocks, start, start + rows < args.spatial ? start + rows : args.spatial};
}

// Calls f(c, load) for every 16 channels, where load(row) reads them and the last ones may be fewer.
template <class T, class F>
MEGADIFF_INLINE void for_channels(int64_t channels, const F& f) {
  const int64_t whole = channels / kLanes * kLanes;
  for (int64_t c = 0; c < whole; c += kLanes)
    f(c, [](const T* row) __attribute__((always_inline)) { return load_vec(row); },
      [](T* row, Vec values) __attribute__((always_inline)) { store_vec(row, values); });
  const int64_t rest = channels - whole;
  if (rest > 0)
    f(whole, [rest](const T* row) __attribute__((always_inline)) { return load_part(row, rest); },
      [rest](T* row, Vec values) __attribute__((always_inline)) { store_part(row, values, rest); });
}

// Calls f(rows_as_constant, row) over [start, stop), kRows at a time and the rest one by one.
template <class F>
MEGADIFF_INLINE void for_rows(int64_t start, int64_t stop, const F& f) {
  int64_t row = start;
  for (; row + kRows <= stop; row += kRows) f(std::integral_constant<int64_t, kRows>{}, row);
  for (; row < stop; ++row) f(std::integral_constant<int64_t, 1>{}, row);
}

// ---- forward

// Mean and squares of each group of a block; `scratch` holds two arrays of padded channels.
template <class T>
void measure_block(const GroupNormSilu& args, int64_t index, float* statistics, float* scratch) {
  const Block block = block_at(args, index);
  const int64_t channels = args.channels, width = channels / args.groups, padded = padded_channels(args);
  const T* x = static_cast<const T*>(args.x) + block.sample * args.spatial * channels;
  const double rows = double(block.stop - block.start);
  float *sums = scratch, *centers = scratch + padded;
  std::memset(sums, 0, size_t(padded) * sizeof(float));
  for_rows(block.start, block.stop, [&](auto count, int64_t row) __attribute__((always_inline)) {
    for_channels<T>(channels, [&](int64_t c, auto load, auto) __attribute__((always_inline)) {
      Vec sum = load_vec(sums + c);
      for (int64_t r = 0; r < decltype(count)::value; ++r) sum += load(x + (row + r) * channels + c);
      store_vec(sums + c, sum);
    });
  });
  for (int64_t group = 0; group < args.groups; ++group) {
    double sum = 0.0;
    for (int64_t c = group * width; c < (group + 1) * width; ++c)
      sum += sums[c] + rows * load_at(args.offset, args.param_dtype, block.sample * args.offset_stride + c, 0.0f);
    const double mean = sum / (rows * double(width));
    statistics[2 * group] = float(mean);
    for (int64_t c = group * width; c < (group + 1) * width; ++c)
      centers[c] = float(mean) - load_at(args.offset, args.param_dtype, block.sample * args.offset_stride + c, 0.0f);
  }
  std::memset(sums, 0, size_t(padded) * sizeof(float));
  for_rows(block.start, block.stop, [&](auto count, int64_t row) __attribute__((always_inline)) {
    for_channels<T>(channels, [&](int64_t c, auto load, auto) __attribute__((always_inline)) {
      const Vec center = load_vec(centers + c);
      Vec sum = load_vec(sums + c);
      for (int64_t r = 0; r < decltype(count)::value; ++r) {
        const Vec difference = load(x + (row + r) * channels + c) - center;
        sum += difference * difference;
      }
      store_vec(sums + c, sum);
    });
  });
  for (int64_t group = 0; group < args.groups; ++group) {
    double squares = 0.0;
    for (int64_t c = group * width; c < (group + 1) * width; ++c) squares += sums[c];
    statistics[2 * group + 1] = float(squares);
  }
}

void merge_blocks(const GroupNormSilu& args, int64_t sample, const float* statistics) {
  const int64_t blocks = num_blocks(args), width = args.channels / args.groups;
  for (int64_t group = 0; group < args.groups; ++group) {
    Moments moments;
    for (int64_t index = sample * blocks; index < (sample + 1) * blocks; ++index) {
      const Block block = block_at(args, index);
      const float* own = statistics + 2 * (index * args.groups + group);
      merge(&moments, double((block.stop - block.start) * width), own[0], own[1]);
    }
    store_statistics(args, sample * args.groups + group, moments);
  }
}

// Three arrays of padded channels: center, slope, intercept.
MEGADIFF_INLINE void write_channels(const GroupNormSilu& args, int64_t sample, float* arrays) {
  const int64_t padded = padded_channels(args);
  for (int64_t c = 0; c < args.channels; ++c) {
    const Channel channel = channel_of(args, sample, c);
    arrays[c] = channel.center;
    arrays[padded + c] = channel.slope;
    arrays[2 * padded + c] = channel.intercept;
  }
}

template <class T, bool kSilu>
void apply_block(const GroupNormSilu& args, const Block& block, const float* arrays) {
  const int64_t channels = args.channels, padded = padded_channels(args);
  const T* x = static_cast<const T*>(args.x) + block.sample * args.spatial * channels;
  T* y = static_cast<T*>(args.y) + block.sample * args.spatial * channels;
  for_rows(block.start, block.stop, [&](auto count, int64_t row) __attribute__((always_inline)) {
    for_channels<T>(channels, [&](int64_t c, auto load, auto store) __attribute__((always_inline)) {
      const Vec center = load_vec(arrays + c), slope = load_vec(arrays + padded + c);
      const Vec intercept = load_vec(arrays + 2 * padded + c);
      for (int64_t r = 0; r < decltype(count)::value; ++r) {
        const int64_t at = (row + r) * channels + c;
        store(y + at, activate<kSilu>((load(x + at) - center) * slope + intercept));
      }
    });
  });
}

// ---- backward

// Arrays of padded channels that backward keeps for a sample, after center, slope and intercept.
constexpr int64_t kArrays = 5;  // center, slope, intercept, tilt, level
constexpr int64_t kSums = 3;    // dz, dz (x - center), x - center

template <class T, bool kSilu>
void sum_block(const GroupNormSilu& args, const Block& block, const float* arrays, float* sums) {
  const int64_t channels = args.channels, padded = padded_channels(args);
  const int64_t base = block.sample * args.spatial * channels;
  const T* x = static_cast<const T*>(args.x) + base;
  const T* y_grad = static_cast<const T*>(args.y_grad) + base;
  T* x_grad = static_cast<T*>(args.x_grad) + base;
  std::memset(sums, 0, size_t(kSums * padded) * sizeof(float));
  for_rows(block.start, block.stop, [&](auto count, int64_t row) __attribute__((always_inline)) {
    for_channels<T>(channels, [&](int64_t c, auto load, auto store) __attribute__((always_inline)) {
      const Vec center = load_vec(arrays + c), slope = load_vec(arrays + padded + c);
      const Vec intercept = load_vec(arrays + 2 * padded + c);
      Vec dz_sum = load_vec(sums + c), dzx_sum = load_vec(sums + padded + c), x_sum = load_vec(sums + 2 * padded + c);
      for (int64_t r = 0; r < decltype(count)::value; ++r) {
        const int64_t at = (row + r) * channels + c;
        const Vec centered = load(x + at) - center;
        const Vec dz = load(y_grad + at) * activation_gradient<kSilu>(centered * slope + intercept);
        if constexpr (std::is_same_v<T, float>) store(x_grad + at, dz);
        dz_sum += dz;
        dzx_sum += dz * centered;
        x_sum += centered;
      }
      store_vec(sums + c, dz_sum);
      store_vec(sums + padded + c, dzx_sum);
      store_vec(sums + 2 * padded + c, x_sum);
    });
  });
}

void join_sums(const GroupNormSilu& args, int64_t sample, const float* block_sums, ChannelSums* sums) {
  const int64_t blocks = num_blocks(args), padded = padded_channels(args);
  for (int64_t c = 0; c < args.channels; ++c) {
    double dz = 0.0, dzx = 0.0, x = 0.0;
    for (int64_t index = sample * blocks; index < (sample + 1) * blocks; ++index) {
      const float* own = block_sums + index * kSums * padded + c;
      dz += own[0];
      dzx += own[padded];
      x += own[2 * padded];
    }
    sums[sample * args.channels + c] = {float(dz), float(dzx), float(x)};
  }
}

MEGADIFF_INLINE void write_gradients(const GroupNormSilu& args, int64_t sample, const ChannelSums* sums, float* arrays) {
  const int64_t padded = padded_channels(args), width = args.channels / args.groups;
  const ChannelSums* own = sums + sample * args.channels;
  for (int64_t group = 0; group < args.groups; ++group) {
    float tilt, level;
    const int64_t first = group * width;
    group_gradient(args, sample, group, &own[first].dz, &own[first].dzx, sizeof(ChannelSums) / sizeof(float), &tilt, &level);
    for (int64_t c = first; c < first + width; ++c) {
      arrays[3 * padded + c] = tilt;
      arrays[4 * padded + c] = level;
    }
  }
}

template <class T, bool kSilu>
void finish_block(const GroupNormSilu& args, const Block& block, const float* arrays) {
  const int64_t channels = args.channels, padded = padded_channels(args);
  const int64_t base = block.sample * args.spatial * channels;
  const T* x = static_cast<const T*>(args.x) + base;
  T* x_grad = static_cast<T*>(args.x_grad) + base;
  const T* source = std::is_same_v<T, float> ? x_grad : static_cast<const T*>(args.y_grad) + base;
  for_rows(block.start, block.stop, [&](auto count, int64_t row) __attribute__((always_inline)) {
    for_channels<T>(channels, [&](int64_t c, auto load, auto store) __attribute__((always_inline)) {
      const Vec center = load_vec(arrays + c), slope = load_vec(arrays + padded + c);
      const Vec intercept = load_vec(arrays + 2 * padded + c);
      const Vec tilt = load_vec(arrays + 3 * padded + c), level = load_vec(arrays + 4 * padded + c);
      for (int64_t r = 0; r < decltype(count)::value; ++r) {
        const int64_t at = (row + r) * channels + c;
        const Vec centered = load(x + at) - center;
        Vec dz = load(source + at);
        if constexpr (!std::is_same_v<T, float>) dz = dz * activation_gradient<kSilu>(centered * slope + intercept);
        store(x_grad + at, dz * slope + (centered * tilt + level));
      }
    });
  });
}

template <class T, bool kSilu>
void backward(const GroupNormSilu& args) {
  const int64_t blocks = num_blocks(args), padded = padded_channels(args);
  auto* sums = reinterpret_cast<ChannelSums*>(args.workspace);
  float* arrays = args.workspace + args.batch * args.channels * kSums;
  float* block_sums = arrays + args.batch * kArrays * padded;
  std::memset(arrays, 0, size_t(args.batch * kArrays * padded) * sizeof(float));
  for (int64_t sample = 0; sample < args.batch; ++sample) write_channels(args, sample, arrays + sample * kArrays * padded);
  parallel_for(args.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index)
      sum_block<T, kSilu>(args, block_at(args, index), arrays + index / blocks * kArrays * padded,
                          block_sums + index * kSums * padded);
  });
  parallel_for(args.batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t sample = begin; sample < end; ++sample) {
      join_sums(args, sample, block_sums, sums);
      write_gradients(args, sample, sums, arrays + sample * kArrays * padded);
    }
  });
  parallel_for(args.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index)
      finish_block<T, kSilu>(args, block_at(args, index), arrays + index / blocks * kArrays * padded);
  });
  parameter_gradients(args, sums);
}

}  // namespace

// The statistics of every block and group; then for every sample three arrays of channels, and two for every block.
int64_t channels_last_forward_workspace(const GroupNormSilu& args) {
  const int64_t blocks = args.batch * num_blocks(args), padded = padded_channels(args);
  return blocks * 2 * args.groups + args.batch * 3 * padded + blocks * 2 * padded;
}

int64_t channels_last_backward_workspace(const GroupNormSilu& args) {
  return args.batch * (kArrays + num_blocks(args) * kSums) * padded_channels(args);
}

template <class T>
void forward_channels_last(const GroupNormSilu& args) {
  const int64_t blocks = num_blocks(args), padded = padded_channels(args);
  float* statistics = args.workspace;
  float* arrays = statistics + args.batch * blocks * 2 * args.groups;
  float* scratch = arrays + args.batch * 3 * padded;
  std::memset(arrays, 0, size_t(args.batch * 3 * padded) * sizeof(float));
  parallel_for(args.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    // The scratch of the first block of the range serves the whole range, so that it stays in the cache.
    for (int64_t index = begin; index < end; ++index)
      measure_block<T>(args, index, statistics + index * 2 * args.groups, scratch + begin * 2 * padded);
  });
  for (int64_t sample = 0; sample < args.batch; ++sample) {
    merge_blocks(args, sample, statistics);
    write_channels(args, sample, arrays + sample * 3 * padded);
  }
  parallel_for(args.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const float* own = arrays + index / blocks * 3 * padded;
      args.silu ? apply_block<T, true>(args, block_at(args, index), own)
                : apply_block<T, false>(args, block_at(args, index), own);
    }
  });
}

template <class T>
void backward_channels_last(const GroupNormSilu& args) {
  args.silu ? backward<T, true>(args) : backward<T, false>(args);
}

template void forward_channels_last<float>(const GroupNormSilu&);
template void forward_channels_last<BFloat16>(const GroupNormSilu&);
template void forward_channels_last<Float16>(const GroupNormSilu&);
template void backward_channels_last<float>(const GroupNormSilu&);
template void backward_channels_last<BFloat16>(const GroupNormSilu&);
template void backward_channels_last<Float16>(const GroupNormSilu&);

}  // namespace megadiff::cpu::MEGADIFF_ISA
