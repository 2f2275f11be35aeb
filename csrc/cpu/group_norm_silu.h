// What the two layouts of GroupNorm-SiLU share: moments that merge, and the coefficients of a channel.
#pragma once

#include "common/group_norm_silu.h"
#include "common/parallel.h"
#include "cpu/element_types.h"

namespace megadiff::cpu::MEGADIFF_ISA {

// Count, mean and sum of squared differences from the mean. Parts are measured in two passes over cached data and joined
// by Chan's formula, so nothing cancels however large the mean is.
struct Moments {
  double count = 0.0, mean = 0.0, squares = 0.0;
};

MEGADIFF_INLINE void merge(Moments* total, double count, double mean, double squares) {
  const double joined = total->count + count, difference = mean - total->mean;
  total->squares += squares + difference * difference * total->count * (count / joined);
  total->mean += difference * (count / joined);
  total->count = joined;
}

// z = (x - center) slope + intercept of one channel of one sample: norm, affine, scale and shift.
struct Channel {
  float center, slope, intercept;
  float gain;  // slope / rstd
};

MEGADIFF_INLINE Channel channel_of(const GroupNormSilu& args, int64_t sample, int64_t channel) {
  const int64_t group = sample * args.groups + channel / (args.channels / args.groups);
  const float offset = load_at(args.offset, args.param_dtype, sample * args.offset_stride + channel, 0.0f);
  const float scale = 1.0f + load_at(args.scale, args.param_dtype, sample * args.scale_stride + channel, 0.0f);
  const float shift = load_at(args.shift, args.param_dtype, sample * args.shift_stride + channel, 0.0f);
  const float gain = load_at(args.weight, args.param_dtype, channel, 1.0f) * scale;
  const float bias = load_at(args.bias, args.param_dtype, channel, 0.0f);
  return {args.mean[group] - offset, args.rstd[group] * gain, bias * scale + shift, gain};
}

MEGADIFF_INLINE void store_statistics(const GroupNormSilu& args, int64_t group, const Moments& moments) {
  args.mean[group] = float(moments.mean);
  args.rstd[group] = float(1.0 / std::sqrt(moments.squares / moments.count + double(args.eps)));
}

// y of z, and the derivative of y for z.
template <bool kSilu>
MEGADIFF_INLINE Vec activate(Vec z) {
  return kSilu ? z / (1.0f + exp_(-z)) : z;
}

template <bool kSilu>
MEGADIFF_INLINE Vec activation_gradient(Vec z) {
  if (!kSilu) return splat(1.0f);
  const Vec s = sigmoid(z);
  return s + z * (s - s * s);
}

// What backward needs of a channel once the sums over its group are known:
// x_grad = dz gain_rstd + (x - center) tilt + level.
struct ChannelGradient {
  float gain_rstd, tilt, level;
};

// From dz_sum = sum dz and dzx_sum = sum dz (x - center) of each channel of a group, which lie `step` floats apart.
MEGADIFF_INLINE void group_gradient(
    const GroupNormSilu& args, int64_t sample, int64_t group, const float* dz_sum, const float* dzx_sum, int64_t step,
    float* tilt, float* level) {
  const int64_t width = args.channels / args.groups;
  const float rstd = args.rstd[sample * args.groups + group];
  double sum = 0.0, product = 0.0;
  for (int64_t c = 0; c < width; ++c) {
    const double gain = channel_of(args, sample, group * width + c).gain;
    sum += gain * dz_sum[c * step];
    product += gain * dzx_sum[c * step];
  }
  const double count = double(width * args.spatial);
  *tilt = float(-double(rstd) * rstd * rstd * product / count);
  *level = float(-double(rstd) * sum / count);
}

// The sums of one channel of one sample, and the gradients of everything small that follow from them.
struct ChannelSums {
  float dz, dzx, x;  // sums of dz, dz (x - center) and x - center over the positions
};

void parameter_gradients(const GroupNormSilu& args, const ChannelSums* sums);

int64_t channels_last_forward_workspace(const GroupNormSilu& args);
int64_t channels_last_backward_workspace(const GroupNormSilu& args);

template <class T>
void forward_channels_first(const GroupNormSilu& args);
template <class T>
void forward_channels_last(const GroupNormSilu& args);
template <class T>
void backward_channels_first(const GroupNormSilu& args);
template <class T>
void backward_channels_last(const GroupNormSilu& args);

}  // namespace megadiff::cpu::MEGADIFF_ISA
