// GroupNorm-SiLU: the small launches between and after the passes, which join partial results in a fixed order.
#include "cuda/group_norm_silu_launches.h"
#include "cuda/group_norm_silu_sums.h"

namespace megadiff::cuda::group_norm {
namespace {

constexpr int kWarps = 4;

// A warp a group.
__global__ void __launch_bounds__(kWarps* kWarpSize) merge_moments_kernel(GroupNormSilu args, Tiling tiling) {
  const int64_t group = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (group >= args.batch * args.groups) return;  // a whole warp leaves, and no barrier follows
  const int parts = int(tiling.pieces * tiling.position_tiles);
  const int64_t width = args.channels / args.groups;
  const float* from = args.workspace + 2 * group * parts;
  const Moments moments = merge(parts, [&](int i) {
    const int piece = i / int(tiling.position_tiles), position_tile = i % int(tiling.position_tiles);
    const int64_t whole = tiling.pieces > 1 ? tiling.channels : width;
    const int64_t channels = smaller(whole, width - piece * whole);
    const int64_t positions = smaller(tiling.positions, args.spatial - int64_t(position_tile) * tiling.positions);
    return Moments{float(channels * positions), from[2 * i], from[2 * i + 1]};
  });
  if (threadIdx.x % kWarpSize == 0) store_statistics(args, group, moments);
}

// A block a group: each warp totals channels, then the first warp the group.
__global__ void __launch_bounds__(kWarps* kWarpSize) join_parts_kernel(GroupNormSilu args, int64_t parts) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t sample = blockIdx.x / args.groups, group = blockIdx.x % args.groups;
  const int64_t width = args.channels / args.groups;
  for (int64_t c = group * width + warp; c < (group + 1) * width; c += kWarps) {
    const float* from = workspace_of(args).parts + sample * parts * kSums * args.channels + c;
    Sums sums = {};
    for (int64_t part = lane; part < parts; part += kWarpSize) {
      sums.dz += from[part * kSums * args.channels];
      sums.product += from[(part * kSums + 1) * args.channels];
      sums.x += from[(part * kSums + 2) * args.channels];
    }
    sums = {warp_sum(sums.dz), warp_sum(sums.product), warp_sum(sums.x)};
    if (lane == 0) store_total(args, sample, c, sums);
  }
  __syncthreads();
  if (warp == 0) finish_group(args, sample, group);
}

// A warp a channel; the lanes share the samples.
__global__ void __launch_bounds__(kWarps* kWarpSize) sum_over_samples_kernel(GroupNormSilu args) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t channel = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (channel >= args.channels) return;  // a whole warp leaves, and no barrier follows
  const int64_t group = channel / (args.channels / args.groups);
  float weight = 0.0f, bias = 0.0f;
  for (int64_t sample = lane; sample < args.batch; sample += kWarpSize) {
    const Sums total = total_of(args, sample, channel);
    const float scale = scale_at(args, sample, channel);
    weight += args.rstd[sample * args.groups + group] * scale * total.product;
    bias += scale * total.dz;
  }
  weight = warp_sum(weight);
  bias = warp_sum(bias);
  if (lane == 0 && args.weight_grad) args.weight_grad[channel] = weight;
  if (lane == 0 && args.bias_grad) args.bias_grad[channel] = bias;
}

}  // namespace

void merge_moments(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  const unsigned blocks = unsigned(ceil_divide(args.batch * args.groups, kWarps));
  MD_LAUNCH(merge_moments_kernel, blocks, kWarps * kWarpSize, 0, stream, args, tiling);
}

void join_parts(const GroupNormSilu& args, const Tiling& tiling, Stream stream) {
  const unsigned blocks = unsigned(args.batch * args.groups);
  MD_LAUNCH(join_parts_kernel, blocks, kWarps * kWarpSize, 0, stream, args, parts_of_channel(args, tiling));
}

void sum_over_samples(const GroupNormSilu& args, Stream stream) {
  const unsigned blocks = unsigned(ceil_divide(args.channels, kWarps));
  MD_LAUNCH(sum_over_samples_kernel, blocks, kWarps * kWarpSize, 0, stream, args);
}

}  // namespace megadiff::cuda::group_norm
