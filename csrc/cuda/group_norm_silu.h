// The arithmetic of GroupNorm-SiLU's kernels: moments that merge, the coefficients of a channel, a pack of elements.
#pragma once

#include "cuda/group_norm_silu_tiling.h"

namespace megadiff::cuda::group_norm {

// Loads that a thread issues together, so that a block waits for several at a time.
constexpr int kInFlight = 4;
constexpr int kPairsInFlight = 2;

// Count, mean and sum of squared differences from the mean.
struct Moments {
  float count, mean, squares;
};

// The moments of `count` values, summed as differences from a pivot. The pivot is one of the values, so the subtraction
// costs at most the precision of `count` roundings.
__device__ __forceinline__ Moments about_pivot(float count, float pivot, float sum, float squares) {
  const float shift = sum / count, rest = squares - sum * shift;
  return {count, pivot + shift, rest < 0.0f ? 0.0f : rest};
}

// The moments of entries 0 .. entries - 1 together, in every lane of the warp. Differences are taken from the mean of
// the first entry, which must not be empty, then from the joint mean: nothing cancels, and equal means stay exact.
template <class Entry>
__device__ __forceinline__ Moments merge(int entries, const Entry& entry) {
  const int lane = threadIdx.x % kWarpSize;
  const float first = entry(0).mean;
  float count = 0.0f, sum = 0.0f, rest = 0.0f, squares = 0.0f;
#pragma unroll 4
  for (int i = lane; i < entries; i += kWarpSize) {
    const Moments part = entry(i);
    count += part.count;
    sum += part.count * (part.mean - first);
  }
  count = warp_sum(count);
  const float mean = first + warp_sum(sum) / count;
#pragma unroll 4
  for (int i = lane; i < entries; i += kWarpSize) {
    const Moments part = entry(i);
    const float difference = part.mean - mean;
    rest += part.count * difference;
    squares += part.squares + part.count * difference * difference;
  }
  return {count, mean + warp_sum(rest) / count, warp_sum(squares)};
}

__device__ __forceinline__ void store_statistics(const GroupNormSilu& args, int64_t group, const Moments& moments) {
  args.mean[group] = moments.mean;
  args.rstd[group] = 1.0f / sqrtf(moments.squares / moments.count + args.eps);
}

__device__ __forceinline__ float parameter(const void* values, Dtype dtype, int64_t index, float otherwise) {
  if (values == nullptr) return otherwise;
  switch (dtype) {
    case Dtype::kFloat32: return static_cast<const float*>(values)[index];
    case Dtype::kBFloat16: return load(static_cast<const BFloat16*>(values)[index]);
    default: return load(static_cast<const Float16*>(values)[index]);
  }
}

__device__ __forceinline__ float offset_at(const GroupNormSilu& args, int64_t sample, int64_t channel) {
  return parameter(args.offset, args.param_dtype, sample * args.offset_stride + channel, 0.0f);
}

__device__ __forceinline__ float scale_at(const GroupNormSilu& args, int64_t sample, int64_t channel) {
  return 1.0f + parameter(args.scale, args.param_dtype, sample * args.scale_stride + channel, 0.0f);
}

// z = (x - center) slope + intercept: norm, affine map, scale and shift.
struct Channel {
  float center, slope, intercept;
};

__device__ __forceinline__ Channel channel_of(const GroupNormSilu& args, int64_t sample, int64_t channel) {
  const int64_t group = sample * args.groups + unsigned(channel) / unsigned(args.channels / args.groups);
  const float scale = scale_at(args, sample, channel);
  const float shift = parameter(args.shift, args.param_dtype, sample * args.shift_stride + channel, 0.0f);
  const float weight = parameter(args.weight, args.param_dtype, channel, 1.0f);
  const float bias = parameter(args.bias, args.param_dtype, channel, 0.0f);
  return {args.mean[group] - offset_at(args, sample, channel), args.rstd[group] * weight * scale, bias * scale + shift};
}

// One value for all elements of a pack, where an array would hold one for each.
template <class Value>
struct Same {
  Value value;
  __device__ __forceinline__ const Value& operator[](int) const { return value; }
};

__device__ __forceinline__ float sigmoid(float z) { return __fdividef(1.0f, 1.0f + __expf(-z)); }

template <class T, int kPack, class Channels>
__device__ __forceinline__ Pack<T, kPack> activated(const Pack<T, kPack>& xs, const Channels& channels, bool silu) {
  float z[kPack];
  Pack<T, kPack> out;
#pragma unroll
  for (int i = 0; i < kPack; ++i)
    z[i] = (load(xs.at[i]) - channels[i].center) * channels[i].slope + channels[i].intercept;
  if (silu) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) z[i] *= sigmoid(z[i]);
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) store(&out.at[i], z[i]);
  return out;
}

// dz = y_grad dy/dz, and x - center.
template <class T, int kPack, class Channels>
__device__ __forceinline__ void differentiate(
    const Pack<T, kPack>& xs, const Pack<T, kPack>& grads, const Channels& channels, bool silu, float (&dz)[kPack],
    float (&centered)[kPack]) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    centered[i] = load(xs.at[i]) - channels[i].center;
    dz[i] = load(grads.at[i]);
  }
  if (silu) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float z = centered[i] * channels[i].slope + channels[i].intercept, s = sigmoid(z);
      dz[i] *= s + z * (s - s * s);
    }
  }
}

// What the sums over a group add to x_grad = dz slope + (x - center) tilt + level.
struct GroupGradient {
  float tilt, level;
};

template <class T, int kPack, class Channels, class Groups>
__device__ __forceinline__ Pack<T, kPack> gradient(
    const Pack<T, kPack>& xs, const Pack<T, kPack>& grads, const Channels& channels, const Groups& groups, bool silu) {
  float dz[kPack], centered[kPack];
  differentiate(xs, grads, channels, silu, dz, centered);
  Pack<T, kPack> out;
#pragma unroll
  for (int i = 0; i < kPack; ++i)
    store(&out.at[i], dz[i] * channels[i].slope + (centered[i] * groups[i].tilt + groups[i].level));
  return out;
}

// use(i, the pack at from(i)) for i = first, first + step, ... below stop.
template <class T, int kPack, class From, class Use>
__device__ __forceinline__ void stream(int first, int stop, int step, const From& from, const Use& use) {
  for (int i = first; i < stop; i += kInFlight * step) {
    Pack<T, kPack> packs[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (i + j * step < stop) packs[j] = read_pack<T, kPack>(from(i + j * step));
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (i + j * step < stop) use(i + j * step, packs[j]);
  }
}

// The same for two tensors: use(i, pack of x, pack of y_grad), both at the offset at(i).
template <class T, int kPack, class At, class Use>
__device__ __forceinline__ void stream_pairs(
    const T* x, const T* y_grad, int first, int stop, int step, const At& at, const Use& use) {
  for (int i = first; i < stop; i += kPairsInFlight * step) {
    Pack<T, kPack> xs[kPairsInFlight], grads[kPairsInFlight];
#pragma unroll
    for (int j = 0; j < kPairsInFlight; ++j) {
      if (i + j * step < stop) {
        xs[j] = read_pack<T, kPack>(x + at(i + j * step));
        grads[j] = read_pack<T, kPack>(y_grad + at(i + j * step));
      }
    }
#pragma unroll
    for (int j = 0; j < kPairsInFlight; ++j)
      if (i + j * step < stop) use(i + j * step, xs[j], grads[j]);
  }
}

// center, slope and intercept of a tile's channels, in three rows of `stride` floats of shared memory.
__device__ __forceinline__ void fill_channels(const GroupNormSilu& args, const Tile& tile, float* rows, int stride) {
  for (int c = threadIdx.x; c < tile.channels; c += blockDim.x) {
    const Channel channel = channel_of(args, tile.sample, tile.channel + c);
    rows[c] = channel.center;
    rows[stride + c] = channel.slope;
    rows[2 * stride + c] = channel.intercept;
  }
}

__device__ __forceinline__ Channel channel_at(const float* rows, int stride, int c) {
  return {rows[c], rows[stride + c], rows[2 * stride + c]};
}

__device__ __forceinline__ void fill_offsets(const GroupNormSilu& args, const Tile& tile, float* row) {
  for (int c = threadIdx.x; c < tile.channels; c += blockDim.x) row[c] = offset_at(args, tile.sample, tile.channel + c);
}

// Moments of the part of a group that lies in a tile: the group's own in one pass, else one of `parts` to be merged.
__device__ __forceinline__ void store_moments(
    const GroupNormSilu& args, const Tiling& tiling, const Tile& tile, int group, const Moments& moments) {
  const int64_t at = tile.sample * args.groups + tile.group + group;
  if (tiling.one_pass) {
    store_statistics(args, at, moments);
  } else {
    const int64_t part = (at * tiling.pieces + tile.piece) * tiling.position_tiles + tile.position_tile;
    args.workspace[2 * part] = moments.mean;
    args.workspace[2 * part + 1] = moments.squares;
  }
}

}  // namespace megadiff::cuda::group_norm
