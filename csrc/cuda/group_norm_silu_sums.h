// What GroupNorm-SiLU's backward sums over the positions of a channel, and what follows for the group.
#pragma once

#include "cuda/group_norm_silu.h"

namespace megadiff::cuda::group_norm {

// Sums of dz, dz (x - center) and x - center.
constexpr int kSums = 3;

struct Sums {
  float dz, product, x;
};

// The workspace of backward: (kSums, N, C) totals, (N, G) group gradients, then (N, parts, kSums, C) sums of parts.
struct Workspace {
  float* totals;
  GroupGradient* groups;
  float* parts;
};

__device__ __forceinline__ Workspace workspace_of(const GroupNormSilu& args) {
  float* groups = args.workspace + kSums * args.batch * args.channels;
  return {args.workspace, reinterpret_cast<GroupGradient*>(groups), groups + 2 * args.batch * args.groups};
}

__device__ __forceinline__ void store_total(
    const GroupNormSilu& args, int64_t sample, int64_t channel, const Sums& sums) {
  float* totals = workspace_of(args).totals + sample * args.channels + channel;
  const int64_t step = args.batch * args.channels;
  totals[0] = sums.dz;
  totals[step] = sums.product;
  totals[2 * step] = sums.x;
}

__device__ __forceinline__ Sums total_of(const GroupNormSilu& args, int64_t sample, int64_t channel) {
  const float* totals = workspace_of(args).totals + sample * args.channels + channel;
  const int64_t step = args.batch * args.channels;
  return {totals[0], totals[step], totals[2 * step]};
}

__device__ __forceinline__ void store_part(
    const GroupNormSilu& args, int64_t sample, int64_t channel, int64_t parts, int64_t part, const Sums& sums) {
  float* to = workspace_of(args).parts + (sample * parts + part) * kSums * args.channels + channel;
  to[0] = sums.dz;
  to[args.channels] = sums.product;
  to[2 * args.channels] = sums.x;
}

// From the totals of a group's channels: its gradient, and those of offset, scale and shift. By one warp.
__device__ __forceinline__ void finish_group(const GroupNormSilu& args, int64_t sample, int64_t group) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t width = args.channels / args.groups, at = sample * args.groups + group;
  const float rstd = args.rstd[at];
  float sum = 0.0f, product = 0.0f;
  for (int64_t c = group * width + lane; c < (group + 1) * width; c += kWarpSize) {
    const float gain = parameter(args.weight, args.param_dtype, c, 1.0f) * scale_at(args, sample, c);
    const Sums total = total_of(args, sample, c);
    sum += gain * total.dz;
    product += gain * total.product;
  }
  sum = warp_sum(sum) / float(width);  // over the positions, a channel of the group
  const float tilt = -rstd * rstd * rstd * (warp_sum(product) / (float(width) * float(args.spatial)));
  if (lane == 0) workspace_of(args).groups[at] = {tilt, -rstd * (sum / float(args.spatial))};
  for (int64_t c = group * width + lane; c < (group + 1) * width; c += kWarpSize) {
    const Sums total = total_of(args, sample, c);
    const float weight = parameter(args.weight, args.param_dtype, c, 1.0f);
    const float bias = parameter(args.bias, args.param_dtype, c, 0.0f), gain = weight * scale_at(args, sample, c);
    const int64_t to = sample * args.channels + c;
    // The sum of x_grad. Its two large terms are subtracted first: they cancel where the group is this channel alone.
    if (args.offset_grad) args.offset_grad[to] = rstd * (gain * total.dz - sum) + tilt * total.x;
    if (args.scale_grad) args.scale_grad[to] = rstd * weight * total.product + bias * total.dz;
    if (args.shift_grad) args.shift_grad[to] = total.dz;
  }
}

}  // namespace megadiff::cuda::group_norm
