// GroupNorm-SiLU on (N, C, spatial): a group is one stretch of memory, read from memory once if it stays in the cache.
#include "cpu/group_norm_silu.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

// Elements that are measured together: they stay in the first-level cache between the two passes.
constexpr int64_t kChunk = 4096;
constexpr int64_t kUnroll = 4;

template <class T>
MEGADIFF_INLINE float sum_chunk(const T* x, int64_t count) {
  Vec sums[kUnroll] = {};
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes)
    for (int64_t u = 0; u < kUnroll; ++u) sums[u] += load_vec(x + i + u * kLanes);
  for (; i + kLanes <= count; i += kLanes) sums[0] += load_vec(x + i);
  if (i < count) sums[1] += load_part(x + i, count - i);
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
MEGADIFF_INLINE float square_chunk(const T* x, int64_t count, float center) {
  Vec sums[kUnroll] = {};
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes) {
    for (int64_t u = 0; u < kUnroll; ++u) {
      const Vec difference = load_vec(x + i + u * kLanes) - center;
      sums[u] += difference * difference;
    }
  }
  for (; i + kLanes <= count; i += kLanes) {
    const Vec difference = load_vec(x + i) - center;
    sums[0] += difference * difference;
  }
  if (i < count) {
    const Vec difference = keep_first(load_part(x + i, count - i) - center, count - i);
    sums[1] += difference * difference;
  }
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Adds `count` elements, each plus `offset`, to the moments.
template <class T>
MEGADIFF_INLINE void measure(const T* x, int64_t count, float offset, Moments* total) {
  for (int64_t start = 0; start < count; start += kChunk) {
    const int64_t size = count - start < kChunk ? count - start : kChunk;
    const double mean = double(sum_chunk(x + start, size)) / double(size);
    // The mean is rounded to float32 in the second pass; Chan's formula is exact for any center.
    const float center = float(mean);
    const double error = mean - double(center);
    const double squares = double(square_chunk(x + start, size, center)) - double(size) * error * error;
    merge(total, double(size), mean + double(offset), squares);
  }
}

template <class T>
Moments measure_group(const GroupNormSilu& args, int64_t sample, int64_t group) {
  const int64_t width = args.channels / args.groups, first = group * width;
  const T* x = static_cast<const T*>(args.x) + (sample * args.channels + first) * args.spatial;
  Moments moments;
  if (!args.offset) {
    measure(x, width * args.spatial, 0.0f, &moments);
    return moments;
  }
  for (int64_t c = 0; c < width; ++c) {
    const float offset = load_at(args.offset, args.param_dtype, sample * args.offset_stride + first + c, 0.0f);
    measure(x + c * args.spatial, args.spatial, offset, &moments);
  }
  return moments;
}

template <class T, bool kSilu>
MEGADIFF_INLINE void apply_row(const T* x, T* y, int64_t count, const Channel& channel) {
  const Vec slope = splat(channel.slope), intercept = splat(channel.intercept);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    store_vec(y + i, activate<kSilu>((load_vec(x + i) - channel.center) * slope + intercept));
  if (i < count)
    store_part(y + i, activate<kSilu>((load_part(x + i, count - i) - channel.center) * slope + intercept), count - i);
}

template <class T, bool kSilu>
void forward_group(const GroupNormSilu& args, int64_t index) {
  const int64_t sample = index / args.groups, group = index % args.groups, width = args.channels / args.groups;
  store_statistics(args, index, measure_group<T>(args, sample, group));
  for (int64_t c = group * width; c < (group + 1) * width; ++c) {
    const int64_t at = (sample * args.channels + c) * args.spatial;
    apply_row<T, kSilu>(
        static_cast<const T*>(args.x) + at, static_cast<T*>(args.y) + at, args.spatial, channel_of(args, sample, c));
  }
}

// dz of 16 elements; `centered` is x - center.
template <bool kSilu>
MEGADIFF_INLINE Vec gradient_before_activation(Vec y_grad, Vec centered, const Channel& channel) {
  return y_grad * activation_gradient<kSilu>(centered * channel.slope + channel.intercept);
}

// The sums of a row; keeps dz in x_grad where that loses nothing, so that it need not be computed twice.
template <class T, bool kSilu>
MEGADIFF_INLINE ChannelSums sum_row(const T* x, const T* y_grad, T* x_grad, int64_t count, const Channel& channel) {
  double dz_total = 0.0, dzx_total = 0.0, x_total = 0.0;
  for (int64_t start = 0; start < count; start += kChunk) {
    const int64_t stop = start + kChunk < count ? start + kChunk : count;
    Vec dz_sum[2] = {}, dzx_sum[2] = {}, x_sum[2] = {};
    int64_t i = start;
    for (int64_t turn = 0; i + kLanes <= stop; i += kLanes, turn ^= 1) {
      const Vec centered = load_vec(x + i) - channel.center;
      const Vec dz = gradient_before_activation<kSilu>(load_vec(y_grad + i), centered, channel);
      if constexpr (std::is_same_v<T, float>) store_vec(x_grad + i, dz);
      dz_sum[turn] += dz;
      dzx_sum[turn] += dz * centered;
      x_sum[turn] += centered;
    }
    if (i < stop) {
      const Vec centered = keep_first(load_part(x + i, stop - i) - channel.center, stop - i);
      const Vec dz = gradient_before_activation<kSilu>(load_part(y_grad + i, stop - i), centered, channel);
      if constexpr (std::is_same_v<T, float>) store_part(x_grad + i, dz, stop - i);
      dz_sum[0] += dz;
      dzx_sum[0] += dz * centered;
      x_sum[0] += centered;
    }
    dz_total += sum_of(dz_sum[0] + dz_sum[1]);
    dzx_total += sum_of(dzx_sum[0] + dzx_sum[1]);
    x_total += sum_of(x_sum[0] + x_sum[1]);
  }
  return {float(dz_total), float(dzx_total), float(x_total)};
}

template <class T, bool kSilu>
MEGADIFF_INLINE void finish_row(
    const T* x, const T* y_grad, T* x_grad, int64_t count, const Channel& channel, const ChannelGradient& gradient) {
  const auto x_gradient = [&](Vec x_values, Vec kept) __attribute__((always_inline)) {
    const Vec centered = x_values - channel.center;
    Vec dz = kept;
    if constexpr (!std::is_same_v<T, float>) dz = gradient_before_activation<kSilu>(kept, centered, channel);
    return dz * gradient.gain_rstd + (centered * gradient.tilt + gradient.level);
  };
  const T* source = std::is_same_v<T, float> ? x_grad : y_grad;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_vec(x_grad + i, x_gradient(load_vec(x + i), load_vec(source + i)));
  if (i < count)
    store_part(x_grad + i, x_gradient(load_part(x + i, count - i), load_part(source + i, count - i)), count - i);
}

template <class T, bool kSilu>
void backward_group(const GroupNormSilu& args, int64_t index) {
  const int64_t sample = index / args.groups, group = index % args.groups, width = args.channels / args.groups;
  const int64_t first = sample * args.channels + group * width;
  auto* sums = reinterpret_cast<ChannelSums*>(args.workspace) + first;
  const T* x = static_cast<const T*>(args.x) + first * args.spatial;
  const T* y_grad = static_cast<const T*>(args.y_grad) + first * args.spatial;
  T* x_grad = static_cast<T*>(args.x_grad) + first * args.spatial;
  for (int64_t c = 0; c < width; ++c) {
    const int64_t at = c * args.spatial;
    sums[c] = sum_row<T, kSilu>(x + at, y_grad + at, x_grad + at, args.spatial, channel_of(args, sample, group * width + c));
  }
  ChannelGradient gradient;
  group_gradient(args, sample, group, &sums->dz, &sums->dzx, sizeof(ChannelSums) / sizeof(float), &gradient.tilt,
                 &gradient.level);
  for (int64_t c = 0; c < width; ++c) {
    const int64_t at = c * args.spatial;
    const Channel channel = channel_of(args, sample, group * width + c);
    gradient.gain_rstd = channel.slope;
    finish_row<T, kSilu>(x + at, y_grad + at, x_grad + at, args.spatial, channel, gradient);
  }
}

}  // namespace

template <class T>
void forward_channels_first(const GroupNormSilu& args) {
  parallel_for(args.batch * args.groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index)
      args.silu ? forward_group<T, true>(args, index) : forward_group<T, false>(args, index);
  });
}

template <class T>
void backward_channels_first(const GroupNormSilu& args) {
  parallel_for(args.batch * args.groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index)
      args.silu ? backward_group<T, true>(args, index) : backward_group<T, false>(args, index);
  });
  parameter_gradients(args, reinterpret_cast<const ChannelSums*>(args.workspace));
}

template void forward_channels_first<float>(const GroupNormSilu&);
template void forward_channels_first<BFloat16>(const GroupNormSilu&);
template void forward_channels_first<Float16>(const GroupNormSilu&);
template void backward_channels_first<float>(const GroupNormSilu&);
template void backward_channels_first<BFloat16>(const GroupNormSilu&);
template void backward_channels_first<Float16>(const GroupNormSilu&);

}  // namespace megadiff::cpu::MEGADIFF_ISA
