// GroupNorm-SiLU on the CPU: chooses the layout, and the gradients of the small tensors.
#include "cpu/group_norm_silu.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

// weight_grad[c] and bias_grad[c], summed over the samples in order.
void affine_gradients(const GroupNormSilu& args, const ChannelSums* sums, int64_t channel) {
  const int64_t width = args.channels / args.groups;
  double weight = 0.0, bias = 0.0;
  for (int64_t sample = 0; sample < args.batch; ++sample) {
    const float rstd = args.rstd[sample * args.groups + channel / width];
    const double scale = 1.0 + load_at(args.scale, args.param_dtype, sample * args.scale_stride + channel, 0.0f);
    weight += scale * rstd * sums[sample * args.channels + channel].dzx;
    bias += scale * sums[sample * args.channels + channel].dz;
  }
  if (args.weight_grad) args.weight_grad[channel] = float(weight);
  if (args.bias_grad) args.bias_grad[channel] = float(bias);
}

void sample_gradients(const GroupNormSilu& args, const ChannelSums* sums, int64_t index) {
  const int64_t sample = index / args.groups, group = index % args.groups, width = args.channels / args.groups;
  const int64_t first = group * width;
  const ChannelSums* own = sums + sample * args.channels;
  const float rstd = args.rstd[index];
  float tilt, level;
  group_gradient(args, sample, group, &own[first].dz, &own[first].dzx, sizeof(ChannelSums) / sizeof(float), &tilt, &level);
  for (int64_t c = first; c < first + width; ++c) {
    const int64_t at = sample * args.channels + c;
    const float weight = load_at(args.weight, args.param_dtype, c, 1.0f);
    const float bias = load_at(args.bias, args.param_dtype, c, 0.0f);
    if (args.shift_grad) args.shift_grad[at] = own[c].dz;
    if (args.scale_grad) args.scale_grad[at] = weight * rstd * own[c].dzx + bias * own[c].dz;
    if (args.offset_grad) {  // the sum of x_grad over the positions
      const float slope = channel_of(args, sample, c).slope;
      args.offset_grad[at] = slope * own[c].dz + tilt * own[c].x + level * float(args.spatial);
    }
  }
}

}  // namespace

void parameter_gradients(const GroupNormSilu& args, const ChannelSums* sums) {
  if (args.shift_grad || args.scale_grad || args.offset_grad)
    for (int64_t index = 0; index < args.batch * args.groups; ++index) sample_gradients(args, sums, index);
  if (args.weight_grad || args.bias_grad)
    for (int64_t channel = 0; channel < args.channels; ++channel) affine_gradients(args, sums, channel);
}

int64_t group_norm_silu_forward_workspace(const GroupNormSilu& args) {
  return args.channels_last ? channels_last_forward_workspace(args) : 0;
}

int64_t group_norm_silu_backward_workspace(const GroupNormSilu& args) {
  const int64_t sums = args.batch * args.channels * int64_t(sizeof(ChannelSums) / sizeof(float));
  return args.channels_last ? sums + channels_last_backward_workspace(args) : sums;
}

void group_norm_silu_forward(const GroupNormSilu& args) {
  with_type(args.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    args.channels_last ? forward_channels_last<T>(args) : forward_channels_first<T>(args);
  });
}

void group_norm_silu_backward(const GroupNormSilu& args) {
  with_type(args.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    args.channels_last ? backward_channels_last<T>(args) : backward_channels_first<T>(args);
  });
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
