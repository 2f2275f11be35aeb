// GroupNorm-SiLU on (N, C, spatial): a group is one stretch of memory, and it is finished while it is in the cache.
#include "cpu/group_norm_silu.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

// Elements whose sums are kept in float32 before they join the others in float64.
constexpr int64_t kChunk = 4096;
constexpr int64_t kUnroll = 4;

// A value near the mean of a chunk: the mean of its first elements, or just the first of a few.
template <class T>
MEGADIFF_INLINE float pivot_of(const T* x, int64_t count) {
  if (count < kUnroll * kLanes) return load(x[0]);
  Vec sum = {};
  for (int64_t u = 0; u < kUnroll; ++u) sum += load_vec(x + u * kLanes);
  return sum_of(sum) / float(kUnroll * kLanes);
}

template <class T>
MEGADIFF_INLINE Moments measure_chunk(const T* x, int64_t count) {
  const float pivot = pivot_of(x, count);
  Vec sums[kUnroll] = {}, squares[kUnroll] = {};
  const auto add = [&](int64_t u, Vec difference) MEGADIFF_INLINE_LAMBDA {
    sums[u] += difference;
    squares[u] += difference * difference;
  };
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes)
    for (int64_t u = 0; u < kUnroll; ++u) add(u, load_vec(x + i + u * kLanes) - pivot);
  for_vectors(count - i, [&](int64_t j, auto lanes) MEGADIFF_INLINE_LAMBDA {
    add(0, lanes.keep(lanes.load(x + i + j) - pivot));
  });
  const Vec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return moments_about(
      pivot, double(count), sum_of(sum), sum_of((squares[0] + squares[1]) + (squares[2] + squares[3])));
}

// Adds `count` elements, each plus `offset`, to the moments.
template <class T>
MEGADIFF_INLINE void measure(const T* x, int64_t count, float offset, Moments* total) {
  for (int64_t start = 0; start < count; start += kChunk) {
    Moments part = measure_chunk(x + start, count - start < kChunk ? count - start : kChunk);
    part.mean += double(offset);
    merge(total, part);
  }
}

// Sample and group of one number, and where the group starts.
struct Group {
  int64_t sample, group, first_channel, start;
};

MEGADIFF_INLINE Group group_at(const GroupNormSilu& args, int64_t index) {
  const int64_t sample = index / args.groups, group = index % args.groups, first = group * group_width(args);
  return {sample, group, first, (sample * args.channels + first) * args.spatial};
}

template <class T>
MEGADIFF_INLINE Moments measure_group(const GroupNormSilu& args, const Group& group) {
  const int64_t width = group_width(args);
  const T* x = static_cast<const T*>(args.x) + group.start;
  Moments moments;
  if (args.offset) {
    const int64_t first = group.sample * args.offset_stride + group.first_channel;
    for (int64_t c = 0; c < width; ++c)
      measure(x + c * args.spatial, args.spatial, load_at(args.offset, args.param_dtype, first + c, 0.0f), &moments);
  } else {
    measure(x, width * args.spatial, 0.0f, &moments);
  }
  return moments;
}

// How far ahead of the elements in work the next group is fetched while this one is computed, which leaves memory idle: its
// own size, if two groups fit in the second-level cache; else the processor looks ahead better by itself.
template <class T>
MEGADIFF_INLINE int64_t fetch_ahead(const GroupNormSilu& args) {
  constexpr int64_t kCacheElements = (512 << 10) / int64_t(sizeof(T));
  const int64_t size = group_width(args) * args.spatial;
  return 2 * size <= kCacheElements ? size : 0;
}

template <class T, bool kSilu, class Lanes>
MEGADIFF_INLINE void forward_group(const GroupNormSilu& args, int64_t index) {
  const Group group = group_at(args, index);
  const Moments moments = measure_group<T>(args, group);
  const float rstd = store_statistics(args, index, moments);
  const int64_t ahead = fetch_ahead<T>(args);
  for (int64_t c = 0; c < group_width(args); ++c) {
    const Channel channel = channel_of(args, group.sample, group.first_channel + c, moments.mean, rstd);
    const T* x = static_cast<const T*>(args.x) + group.start + c * args.spatial;
    T* y = static_cast<T*>(args.y) + group.start + c * args.spatial;
    for_vectors<Lanes>(args.spatial, [&](int64_t i, auto lanes) MEGADIFF_INLINE_LAMBDA {
      __builtin_prefetch(x + i + ahead, 0, 2);
      lanes.store(y + i, activate<kSilu>((lanes.load(x + i) - channel.center) * channel.slope + channel.intercept));
    });
  }
}

template <class T, bool kSilu>
MEGADIFF_INLINE void sum_channel(
    const GroupNormSilu& args, const SampleChannels& all, int64_t c, const T* x, const T* y_grad, T* x_grad) {
  const Channel channel = {all.center[c], all.slope[c], all.intercept[c]};
  const bool sums_x = args.offset_grad != nullptr;
  double dz_total = 0.0, dzx_total = 0.0, x_total = 0.0;
  for (int64_t start = 0; start < args.spatial; start += kChunk) {
    Vec dz_sum = {}, dzx_sum = {}, x_sum = {};
    const int64_t count = args.spatial - start < kChunk ? args.spatial - start : kChunk;
    for_vectors(count, [&](int64_t i, auto lanes) MEGADIFF_INLINE_LAMBDA {
      i += start;
      const Vec centered = lanes.keep(lanes.load(x + i) - channel.center);
      const Vec dz = lanes.load(y_grad + i) * activation_slope<kSilu>(centered * channel.slope + channel.intercept);
      if constexpr (kKeepsDz<T>) lanes.store(x_grad + i, dz);
      dz_sum += dz;
      dzx_sum += dz * centered;
      if (sums_x) x_sum += centered;
    });
    dz_total += sum_of(dz_sum);
    dzx_total += sum_of(dzx_sum);
    x_total += sum_of(x_sum);
  }
  all.dz[c] = float(dz_total);
  all.dzx[c] = float(dzx_total);
  all.x[c] = float(x_total);
}

template <class T, bool kSilu>
MEGADIFF_INLINE void finish_channel(
    const GroupNormSilu& args, const SampleChannels& all, int64_t c, const T* x, const T* y_grad, T* x_grad) {
  const Channel channel = {all.center[c], all.slope[c], all.intercept[c]};
  const float tilt = all.tilt[c], level = all.level[c];
  const T* source = kKeepsDz<T> ? x_grad : y_grad;
  for_vectors(args.spatial, [&](int64_t i, auto lanes) MEGADIFF_INLINE_LAMBDA {
    const Vec centered = lanes.load(x + i) - channel.center;
    Vec dz = lanes.load(source + i);
    if constexpr (!kKeepsDz<T>) dz *= activation_slope<kSilu>(centered * channel.slope + channel.intercept);
    lanes.store(x_grad + i, dz * channel.slope + (centered * tilt + level));
  });
}

template <class T, bool kSilu>
MEGADIFF_INLINE void backward_group(const GroupNormSilu& args, int64_t index) {
  const Group group = group_at(args, index);
  const SampleChannels all = channels_of(args, group.sample);
  write_channels(args, all, group.sample, group.group, args.mean[index], args.rstd[index]);
  const T* x = static_cast<const T*>(args.x) + group.start;
  const T* y_grad = static_cast<const T*>(args.y_grad) + group.start;
  T* x_grad = static_cast<T*>(args.x_grad) + group.start;
  for (int64_t c = 0; c < group_width(args); ++c) {
    const int64_t at = c * args.spatial;
    sum_channel<T, kSilu>(args, all, group.first_channel + c, x + at, y_grad + at, x_grad + at);
  }
  group_gradients(args, all, group.sample, group.group);
  for (int64_t c = 0; c < group_width(args); ++c) {
    const int64_t at = c * args.spatial;
    finish_channel<T, kSilu>(args, all, group.first_channel + c, x + at, y_grad + at, x_grad + at);
  }
}

// Calls f(index) for every group of every sample, on the threads there are.
template <class F>
MEGADIFF_INLINE void for_groups(const GroupNormSilu& args, const F& f) {
  const int64_t grain = 1 + kGrainElements / (group_width(args) * args.spatial);
  parallel_for(args.batch * args.groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) f(index);
    stream_fence();
  });
}

}  // namespace

void forward_channels_first(const GroupNormSilu& args) {
  with_forward_kernel(args, args.spatial, [&](auto type, auto silu, auto lanes) {
    using T = typename decltype(type)::type;
    for_groups(args, [&](int64_t index) {
      forward_group<T, decltype(silu)::value, decltype(lanes)>(args, index);
    });
  });
}

void backward_channels_first(const GroupNormSilu& args) {
  with_kernel(args, [&](auto type, auto silu) {
    using T = typename decltype(type)::type;
    for_groups(args, [&](int64_t index) { backward_group<T, decltype(silu)::value>(args, index); });
  });
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
