// The values behind messages of bucket codes, or the mean of the values of several.
#include "bucket_codes.cuh"

using namespace qsync;

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;  // a warp takes a bucket

// The codes of a bucket as a thread of its warp reads them.
struct Codes {
  const uint8_t* first;
  int bits, unit;
  uint32_t mask;

  __device__ __forceinline__ Codes(const Messages<const uint8_t>& messages, int64_t part, int64_t bucket)
      : first(messages.codes_of(part, bucket)),
        bits(messages.bits),
        unit(unit_of(first, bits)),
        mask((1u << messages.bits) - 1) {}

  // The codes from `at` on to the end of their group.
  __device__ __forceinline__ uint64_t load(int at) const {
    return load_word(first + at / kGroup * bits, bits, unit) >> (at % kGroup * bits);
  }
  __device__ __forceinline__ uint32_t code(uint64_t word, int i) const {
    const uint32_t four = static_cast<uint32_t>(i < 4 ? word : word >> (4 * bits));
    return (four >> (i % 4 * bits)) & mask;
  }
};

// A bucket's codes to values: evenly spaced, with a shift of all that may be 0, or by a table.
template <bool kLearned> struct Values {
  float low, unit, shift;
  const float* table;

  __device__ __forceinline__ Values(float2 range, float shift, const float* table)
      : low(range.x), unit(range.y), shift(shift), table(table) {}

  __device__ __forceinline__ float operator()(uint32_t code) const {
    return low + unit * (kLearned ? table[code] : small_to_float(code) + shift);
  }
};

// The table in shared memory, where every thread may read another entry.
template <bool kLearned> __device__ __forceinline__ void copy_table(const float* from, float* to, int bits) {
  if constexpr (kLearned) {
    for (int i = threadIdx.x; i < 1 << bits; i += kThreads) to[i] = __ldg(from + i);
    __syncthreads();
  }
}

__device__ __forceinline__ int64_t bucket_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}

// A thread writes 16 bytes: eight 16-bit values, or half a group of 32-bit ones. Block row y takes message y.
template <typename T, bool kLearned>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(Messages<const uint8_t> messages, const float* __restrict__ table, bool shifts, RandomKey random,
                  T* __restrict__ out) {
  constexpr int kValues = 16 / sizeof(T), kStride = 32 * kValues, kAhead = 4;  // loads before the first is read
  __shared__ float levels[kMostLearned];
  copy_table<kLearned>(table, levels, messages.bits);
  const int64_t bucket = bucket_of_warp(), part = blockIdx.y;
  if (bucket >= messages.buckets) return;
  const int64_t place = part * messages.buckets + bucket;
  const float2 range = load_range(messages.range_of(part, bucket));
  const Values<kLearned> value(range, shifts ? shift_of(place, random) : 0.0f, levels);
  const Codes codes(messages, part, bucket);
  T* to = out + place * messages.bucket_size;
  for (int from = threadIdx.x % 32 * kValues; from < messages.bucket_size; from += kAhead * kStride) {
    uint64_t words[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      words[j] = from + j * kStride < messages.bucket_size ? codes.load(from + j * kStride) : 0;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      alignas(16) T values[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] = from_float<T>(value(codes.code(words[j], i)));
      if (from + j * kStride < messages.bucket_size)
        *reinterpret_cast<uint4*>(to + from + j * kStride) = *reinterpret_cast<const uint4*>(values);
    }
  }
}

// The sum over messages, in their order, over a divisor.
template <bool kLearned>
__global__ void __launch_bounds__(kThreads)
    mean_kernel(Messages<const uint8_t> messages, int parts, const float* __restrict__ table, float divisor,
                float* __restrict__ out) {
  constexpr int kValues = 4, kStride = 32 * kValues, kAhead = 2;
  __shared__ float levels[kMostLearned];
  copy_table<kLearned>(table, levels, messages.bits);
  const int64_t bucket = bucket_of_warp();
  if (bucket >= messages.buckets) return;
  float* to = out + bucket * messages.bucket_size;
  for (int from = threadIdx.x % 32 * kValues; from < messages.bucket_size; from += kAhead * kStride) {
    float total[kAhead][kValues];
    for (int part = 0; part < parts; ++part) {
      const Codes codes(messages, part, bucket);
      const Values<kLearned> value(load_range(messages.range_of(part, bucket)), 0.0f, levels);
      uint64_t words[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        words[j] = from + j * kStride < messages.bucket_size ? codes.load(from + j * kStride) : 0;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          const float own = value(codes.code(words[j], i));
          total[j][i] = part == 0 ? own : total[j][i] + own;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const float4 mean = make_float4(total[j][0] / divisor, total[j][1] / divisor, total[j][2] / divisor,
                                      total[j][3] / divisor);
      if (from + j * kStride < messages.bucket_size) *reinterpret_cast<float4*>(to + from + j * kStride) = mean;
    }
  }
}

template <typename T>
int decode(const Messages<const uint8_t>& messages, int parts, const float* table, bool shifts, RandomKey random,
           void* out, cudaStream_t stream) {
  const int64_t blocks = ceil_div(messages.buckets, int64_t{kWarps});
  if (blocks > INT32_MAX || !aligned(out, 16)) return kBadArgument;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts));
  auto* kernel = table == nullptr ? decode_kernel<T, false> : decode_kernel<T, true>;
  kernel<<<grid, kThreads, 0, stream>>>(messages, table, shifts, random, static_cast<T*>(out));
  return last_error();
}

}  // namespace

QSYNC_API int qsync_message_decode(const void* messages, int64_t stride, int parts, int64_t buckets, int bucket_size,
                                   int bits, int scheme, const float* table, uint64_t key, uint64_t tensor, void* out,
                                   int element, cudaStream_t stream) {
  if (!fits(bits, bucket_size, parts, buckets, scheme, table)) return kBadArgument;
  const Messages<const uint8_t> from = {static_cast<const uint8_t*>(messages), stride, buckets, bucket_size, bits};
  const RandomKey random = random_key(key, tensor);
  const bool shifts = scheme == kShift;
  switch (element) {
    case kFloat32:
      return decode<float>(from, parts, table, shifts, random, out, stream);
    case kBFloat16:
      return decode<__nv_bfloat16>(from, parts, table, shifts, random, out, stream);
    case kFloat16:
      return decode<__half>(from, parts, table, shifts, random, out, stream);
    default:
      return kBadArgument;
  }
}

QSYNC_API int qsync_message_mean(const void* messages, int64_t stride, int parts, int64_t buckets, int bucket_size,
                                 int bits, const float* table, float divisor, float* out, cudaStream_t stream) {
  if (!fits(bits, bucket_size, parts, buckets, kNearest, table) || !aligned(out, 16)) return kBadArgument;
  const Messages<const uint8_t> from = {static_cast<const uint8_t*>(messages), stride, buckets, bucket_size, bits};
  const int64_t blocks = ceil_div(buckets, int64_t{kWarps});
  if (blocks > INT32_MAX) return kBadArgument;
  auto* kernel = table == nullptr ? mean_kernel<false> : mean_kernel<true>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(from, parts, table, divisor, out);
  return last_error();
}
