// The launches of which forward and backward of GroupNorm-SiLU consist, one file each.
#pragma once

#include "cuda/group_norm_silu_tiling.h"

namespace megadiff::cuda::group_norm {

void forward_in_one_pass_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream);
void forward_in_one_pass_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream);

// Two passes: moments of tiles into the workspace, their merging into mean and rstd, then y.
void measure_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream);
void measure_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream);
void merge_moments(const GroupNormSilu& args, const Tiling& tiling, Stream stream);
void activate_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream);
void activate_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream);

// All but the gradients of weight and bias.
void backward_in_one_pass_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream);
void backward_in_one_pass_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream);

// Two passes: sums of `parts` of each channel into the workspace, their totals with the gradients of offset, scale and
// shift, then x_grad.
int64_t parts_of_channel(const GroupNormSilu& args, const Tiling& tiling);
void sum_parts_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream);
void sum_parts_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream);
void join_parts(const GroupNormSilu& args, const Tiling& tiling, Stream stream);
void x_grad_channels_first(const GroupNormSilu& args, const Tiling& tiling, Stream stream);
void x_grad_channels_last(const GroupNormSilu& args, const Tiling& tiling, Stream stream);

// The gradients of weight and bias from the totals of every sample and channel.
void sum_over_samples(const GroupNormSilu& args, Stream stream);

}  // namespace megadiff::cuda::group_norm
