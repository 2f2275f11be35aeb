// GroupNorm-SiLU on the CPU: chooses the layout, and computes the gradients of everything that is small.
#include "cpu/group_norm_silu.h"

namespace megadiff::cpu::MEGADIFF_ISA {

void group_gradients(const GroupNormSilu& args, const SampleChannels& all, int64_t sample, int64_t group) {
  const int64_t width = group_width(args), first = group * width, row = sample * args.channels;
  double sum = 0.0, product = 0.0;
  for (int64_t c = first; c < first + width; ++c) {
    sum += double(all.slope[c]) * all.dz[c];
    product += double(all.slope[c]) * all.dzx[c];
  }
  const float rstd = args.rstd[sample * args.groups + group];
  const double count = double(width * args.spatial);
  const double tilt = -double(rstd) * rstd * product / count, level = -sum / count;
  for (int64_t c = first; c < first + width; ++c) {
    all.tilt[c] = float(tilt);
    all.level[c] = float(level);
    if (args.shift_grad) args.shift_grad[row + c] = all.dz[c];
    if (args.scale_grad) {
      const float weight = load_at(args.weight, args.param_dtype, c, 1.0f);
      args.scale_grad[row + c] = weight * rstd * all.dzx[c] + load_at(args.bias, args.param_dtype, c, 0.0f) * all.dz[c];
    }
    if (args.offset_grad)  // the sum of x_grad over the positions
      args.offset_grad[row + c] =
          float(double(all.slope[c]) * all.dz[c] + tilt * all.x[c] + level * double(args.spatial));
  }
}

void affine_gradients(const GroupNormSilu& args) {
  if (!args.weight_grad && !args.bias_grad) return;
  const int64_t width = group_width(args);
  for (int64_t c = 0; c < args.channels; ++c) {
    if (args.weight_grad) args.weight_grad[c] = 0.0f;
    if (args.bias_grad) args.bias_grad[c] = 0.0f;
  }
  for (int64_t sample = 0; sample < args.batch; ++sample) {
    const SampleChannels all = channels_of(args, sample);
    for (int64_t c = 0; c < args.channels; ++c) {
      const float scale = 1.0f + load_at(args.scale, args.param_dtype, sample * args.scale_stride + c, 0.0f);
      const float rstd = args.rstd[sample * args.groups + c / width];
      if (args.weight_grad) args.weight_grad[c] += scale * rstd * all.dzx[c];
      if (args.bias_grad) args.bias_grad[c] += scale * all.dz[c];
    }
  }
}

int64_t group_norm_silu_forward_workspace(const GroupNormSilu& args) {
  return args.channels_last ? channels_last_forward_workspace(args) : 0;
}

int64_t group_norm_silu_backward_workspace(const GroupNormSilu& args) {
  return args.channels_last ? channels_last_backward_workspace(args) : channels_workspace(args);
}

void group_norm_silu_forward(const GroupNormSilu& args) {
  args.channels_last ? forward_channels_last(args) : forward_channels_first(args);
}

void group_norm_silu_backward(const GroupNormSilu& args) {
  args.channels_last ? backward_channels_last(args) : backward_channels_first(args);
  affine_gradients(args);
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
