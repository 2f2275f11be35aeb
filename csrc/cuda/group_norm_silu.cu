// GroupNorm-SiLU on CUDA: one pass over memory where groups fit in shared memory, else two.
#include "common/group_norm_silu.h"

#include "cuda/group_norm_silu_launches.h"

namespace megadiff::cuda {

using namespace group_norm;

namespace {

constexpr int kForwardStreams = 1, kBackwardStreams = 2;
constexpr int64_t kMoment = 2, kSumsOfChannel = 3, kGroupGradient = 2;  // floats

}  // namespace

int64_t group_norm_silu_forward_workspace(const GroupNormSilu& args) {
  const Tiling tiling = tiling_of(args, kForwardStreams);
  return tiling.one_pass ? 0 : kMoment * args.batch * args.groups * tiling.pieces * tiling.position_tiles;
}

void group_norm_silu_forward(const GroupNormSilu& args, Stream stream) {
  const Tiling tiling = tiling_of(args, kForwardStreams);
  if (tiling.one_pass) {
    const auto forward =
        tiling.channels_last ? forward_in_one_pass_channels_last : forward_in_one_pass_channels_first;
    return forward(args, tiling, stream);
  }
  (tiling.channels_last ? measure_channels_last : measure_channels_first)(args, tiling, stream);
  merge_moments(args, tiling, stream);
  (tiling.channels_last ? activate_channels_last : activate_channels_first)(args, tiling, stream);
}

int64_t group_norm_silu_backward_workspace(const GroupNormSilu& args) {
  const Tiling tiling = tiling_of(args, kBackwardStreams);
  const int64_t parts = tiling.one_pass ? 0 : parts_of_channel(args, tiling);
  return kSumsOfChannel * args.batch * args.channels * (1 + parts) + kGroupGradient * args.batch * args.groups;
}

void group_norm_silu_backward(const GroupNormSilu& args, Stream stream) {
  const Tiling tiling = tiling_of(args, kBackwardStreams);
  if (tiling.one_pass) {
    const auto backward =
        tiling.channels_last ? backward_in_one_pass_channels_last : backward_in_one_pass_channels_first;
    backward(args, tiling, stream);
  } else {
    (tiling.channels_last ? sum_parts_channels_last : sum_parts_channels_first)(args, tiling, stream);
    join_parts(args, tiling, stream);
    (tiling.channels_last ? x_grad_channels_last : x_grad_channels_first)(args, tiling, stream);
  }
  if (args.weight_grad || args.bias_grad) sum_over_samples(args, stream);
}

}  // namespace megadiff::cuda
