// What the two layouts of GroupNorm-SiLU share: moments that merge, the coefficients and gradients of a channel.
#pragma once

#include "common/group_norm_silu.h"
#include "common/parallel.h"
#include "cpu/element_types.h"

namespace megadiff::cpu::MEGADIFF_ISA {

MEGADIFF_INLINE int64_t group_width(const GroupNormSilu& args) { return args.channels / args.groups; }

// Count, mean and sum of squared differences from the mean; parts are joined by Chan's formula, so nothing cancels
// however large the mean is.
struct Moments {
  double count = 0.0, mean = 0.0, squares = 0.0;
};

// Moments of `count` values of which sum (value - pivot) and sum (value - pivot)^2 are known. The pivot is one of them or
// a mean of some of them, so it is as far from their mean as they are, and little cancels.
MEGADIFF_INLINE Moments moments_about(double pivot, double count, double sum, double squares) {
  return {count, pivot + sum / count, squares - sum * sum / count};
}

MEGADIFF_INLINE void merge(Moments* total, const Moments& part) {
  const double count = total->count + part.count, share = part.count / count, difference = part.mean - total->mean;
  total->squares += part.squares + difference * difference * total->count * share;
  total->mean += difference * share;
  total->count = count;
}

// Writes mean and rstd of a group (counted over all samples), and returns rstd.
MEGADIFF_INLINE float store_statistics(const GroupNormSilu& args, int64_t index, const Moments& moments) {
  args.mean[index] = float(moments.mean);
  // Rounding may leave a little less than nothing of the squares of a constant group; a NaN stays.
  const double squares = moments.squares < 0.0 ? 0.0 : moments.squares;
  return args.rstd[index] = float(1.0 / std::sqrt(squares / moments.count + double(args.eps)));
}

// z = (x - center) slope + intercept: norm, affine map, scale and shift of one channel of one sample.
struct Channel {
  float center, slope, intercept;
};

MEGADIFF_INLINE Channel channel_of(const GroupNormSilu& args, int64_t sample, int64_t channel, double mean, float rstd) {
  const float offset = load_at(args.offset, args.param_dtype, sample * args.offset_stride + channel, 0.0f);
  const float scale = 1.0f + load_at(args.scale, args.param_dtype, sample * args.scale_stride + channel, 0.0f);
  const float shift = load_at(args.shift, args.param_dtype, sample * args.shift_stride + channel, 0.0f);
  const float slope = rstd * load_at(args.weight, args.param_dtype, channel, 1.0f) * scale;
  const float bias = load_at(args.bias, args.param_dtype, channel, 0.0f);
  const double exact = mean - double(offset);
  const float center = float(exact);
  // What rounding left of the center joins the intercept: with a mean of 1000 it is worth hundreds of roundings of z.
  return {center, slope, bias * scale + shift - float(exact - double(center)) * slope};
}

// What is known of the channels of one sample: arrays of padded_channels() floats, so that they are read and written in
// whole vectors.
struct SampleChannels {
  float *center, *slope, *intercept;  // z = (x - center) slope + intercept
  float *tilt, *level;                // x_grad = dz slope + (x - center) tilt + level
  float *dz, *dzx, *x;                // sums over the positions of dz, dz (x - center) and x - center
};
constexpr int64_t kChannelArrays = 8;

MEGADIFF_INLINE int64_t padded_channels(const GroupNormSilu& args) {
  return (args.channels + kLanes - 1) / kLanes * kLanes;
}

// They lie at the start of the workspace.
MEGADIFF_INLINE int64_t channels_workspace(const GroupNormSilu& args) {
  return args.batch * kChannelArrays * padded_channels(args);
}

MEGADIFF_INLINE SampleChannels channels_of(const GroupNormSilu& args, int64_t sample) {
  const int64_t padded = padded_channels(args);
  float* first = args.workspace + sample * kChannelArrays * padded;
  return {first,              first + padded,     first + 2 * padded, first + 3 * padded,
          first + 4 * padded, first + 5 * padded, first + 6 * padded, first + 7 * padded};
}

MEGADIFF_INLINE void write_channels(
    const GroupNormSilu& args, const SampleChannels& all, int64_t sample, int64_t group, double mean, float rstd) {
  const int64_t width = group_width(args);
  for (int64_t c = group * width; c < (group + 1) * width; ++c) {
    const Channel channel = channel_of(args, sample, c, mean, rstd);
    all.center[c] = channel.center;
    all.slope[c] = channel.slope;
    all.intercept[c] = channel.intercept;
  }
}

// From the sums of the channels of a group: their tilt and level, and the gradients of offset, scale and shift.
void group_gradients(const GroupNormSilu& args, const SampleChannels& all, int64_t sample, int64_t group);

// The gradients of weight and bias, once every group has its sums.
void affine_gradients(const GroupNormSilu& args);

// The gradient is computed in two passes, because its sums over the group are needed first. In float32, x_grad holds dz
// between them; a narrower type would round it, and computes it twice.
template <class T>
constexpr bool kKeepsDz = std::is_same_v<T, float>;

template <bool kSilu>
MEGADIFF_INLINE Vec activate(Vec z) {
  return kSilu ? silu(z) : z;
}

// The derivative of the activation at z.
template <bool kSilu>
MEGADIFF_INLINE Vec activation_slope(Vec z) {
  if constexpr (!kSilu) return splat(1.0f);
  const Vec s = sigmoid(z);
  return s * (1.0f + (z - z * s));
}

// Calls f(Type<T>{}, std::bool_constant<silu>{}).
template <class F>
MEGADIFF_INLINE void with_kernel(const GroupNormSilu& args, const F& f) {
  with_type(args.dtype, [&](auto type) { args.silu ? f(type, std::true_type{}) : f(type, std::false_type{}); });
}

// Calls f(Type<T>{}, std::bool_constant<silu>{}, Lanes{}) with the Lanes that write y, whose rows have `row` elements:
// past the caches if it is too large to be found there later, and its vectors are aligned.
template <class F>
MEGADIFF_INLINE void with_forward_kernel(const GroupNormSilu& args, int64_t row, const F& f) {
  constexpr int64_t kStreamBytes = 4 << 20;
  with_kernel(args, [&](auto type, auto silu) {
    constexpr int64_t kBytes = sizeof(typename decltype(type)::type);
    const bool is_aligned = row % kLanes == 0 && reinterpret_cast<uintptr_t>(args.y) % (kLanes * kBytes) == 0;
    const bool is_large = args.batch * args.channels * args.spatial * kBytes >= kStreamBytes;
    is_aligned && is_large ? f(type, silu, Streamed{}) : f(type, silu, Whole{});
  });
}

void forward_channels_first(const GroupNormSilu& args);
void backward_channels_first(const GroupNormSilu& args);

int64_t channels_last_forward_workspace(const GroupNormSilu& args);
int64_t channels_last_backward_workspace(const GroupNormSilu& args);
void forward_channels_last(const GroupNormSilu& args);
void backward_channels_last(const GroupNormSilu& args);

}  // namespace megadiff::cpu::MEGADIFF_ISA
