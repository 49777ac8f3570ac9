// Codes of 2 to 8 bits between the least and the greatest value of each bucket, and back.
// Eight codes fill `bits` whole bytes. Laws: qsync_opt/kernels/reference.py.
#include <cfloat>

#include "codes.cuh"

using namespace qsync;

namespace {

enum Scheme : int { kNearest = 0, kStochasticScheme = 1, kShift = 2 };
constexpr int kKept = 4;           // groups of eight a thread keeps in registers
constexpr int kMostThreads = 256;  // a block; buckets of up to 8192 elements are read once

__device__ __forceinline__ float shift_of(int64_t bucket, const RandomKey& random) {
  return uniform_of(static_cast<uint64_t>(bucket), random) - 0.5f;
}

// Eight elements in registers as they lie in memory, those past the end of the bucket 0.
template <typename T> struct Kept {
  Raw8<T> raw;

  __device__ __forceinline__ void load(const T* from, int count, bool vectors) {
    if (vectors && count >= 8) {
      raw.load(from);
    } else {
      T* to = reinterpret_cast<T*>(raw.word);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = i < count ? from[i] : from_float<T>(0.0f);
    }
  }
  __device__ __forceinline__ void unpack(float (&v)[8]) const { raw.unpack(v); }
};

// The smaller and the larger of two numbers, NaN if one of them is.
__device__ __forceinline__ float least(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || b != b ? NAN : fminf(a, b);
#endif
}

__device__ __forceinline__ float greatest(float a, float b) { return -least(-a, -b); }

// The order of floats as that of unsigned integers, and back; NaN has no place.
__device__ __forceinline__ uint32_t place_of(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float value_at(uint32_t place) {
  return __uint_as_float(place ^ (place >> 31 ? 0x80000000u : 0xffffffffu));
}

struct Range {
  float low, high;

  __device__ __forceinline__ void add(const float (&v)[8], int count) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) merge(v[i], v[i]);
  }
  __device__ __forceinline__ void merge(float other_low, float other_high) {
    low = least(low, other_low);
    high = greatest(high, other_high);
  }

  // Over the threads in x of a block; every one gets the result.
  __device__ __forceinline__ void share(float (*slots)[kMostThreads / 32]) {
    const bool broken = __any_sync(~0u, low != low || high != high);
    low = broken ? NAN : value_at(~warp_max(~place_of(low)));
    high = broken ? NAN : value_at(warp_max(place_of(high)));
    const int warps = blockDim.x / 32;
    if (warps == 1) return;
    const int first = threadIdx.y * warps, lane = threadIdx.x & 31;
    if (lane == 0) {
      slots[0][first + threadIdx.x / 32] = low;
      slots[1][first + threadIdx.x / 32] = high;
    }
    __syncthreads();
    for (int i = 0; i < warps; ++i) merge(slots[0][first + i], slots[1][first + i]);
  }
};

// `bits` bytes of eight codes, each below 2^bits.
__device__ __forceinline__ void store_packed(uint8_t* to, uint64_t word, int bytes, int bits) {
  if (bits == 8 && bytes == 8 && (reinterpret_cast<uintptr_t>(to) & 7) == 0) {
    *reinterpret_cast<uint64_t*>(to) = word;
  } else if (bits == 4 && bytes == 4 && (reinterpret_cast<uintptr_t>(to) & 3) == 0) {
    *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(word);
  } else if (bits == 2 && bytes == 2 && (reinterpret_cast<uintptr_t>(to) & 1) == 0) {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word);
  } else {
    for (int i = 0; i < bytes; ++i) to[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

__device__ __forceinline__ uint64_t load_packed(const uint8_t* from, int bytes, int bits) {
  if (bits == 8 && bytes == 8 && (reinterpret_cast<uintptr_t>(from) & 7) == 0)
    return __ldg(reinterpret_cast<const unsigned long long*>(from));
  if (bits == 4 && bytes == 4 && (reinterpret_cast<uintptr_t>(from) & 3) == 0)
    return __ldg(reinterpret_cast<const unsigned int*>(from));
  if (bits == 2 && bytes == 2 && (reinterpret_cast<uintptr_t>(from) & 1) == 0)
    return __ldg(reinterpret_cast<const unsigned short*>(from));
  uint64_t word = 0;
  for (int i = 0; i < bytes; ++i) word |= static_cast<uint64_t>(__ldg(from + i)) << (8 * i);
  return word;
}

// The block's threads in x share a bucket; its rows in y take neighbouring buckets.
template <typename T, int kScheme>
__global__ void __launch_bounds__(kMostThreads)
    encode_kernel(const T* __restrict__ x, int64_t count, int bits, int bucket_size, int64_t buckets, RandomKey random,
                  bool vectors, uint8_t* __restrict__ packed, float* __restrict__ meta) {
  __shared__ float slots[2][kMostThreads / 32];
  const int64_t bucket = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, start = bucket * bucket_size;
  const int size = static_cast<int>(max(min(count - start, static_cast<int64_t>(bucket_size)), int64_t{0}));
  const int stride = blockDim.x * 8;
  Kept<T> kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = threadIdx.x * 8 + i * stride;
    if (at < size) kept[i].load(x + start + at, size - at, vectors);
  }
  Range range = {INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    float v[8];
    kept[i].unpack(v);
    range.add(v, size - static_cast<int>(threadIdx.x * 8 + i * stride));
  }
  for (int at = threadIdx.x * 8 + kKept * stride; at < size; at += stride) {
    float v[8];
    Raw8<T>::load_some(x + start + at, size - at, v);
    range.add(v, size - at);
  }
  range.share(slots);
  if (bucket >= buckets) return;
  const float levels = static_cast<float>((1 << bits) - 1), step = (range.high - range.low) / levels;
  if (threadIdx.x == 0) *reinterpret_cast<float2*>(meta + bucket * 2) = make_float2(range.low, step);
  const bool usable = step > 0.0f && step <= FLT_MAX;
  const float shift = kScheme == kShift ? shift_of(bucket, random) : 0.0f;
  const Divider divide(usable ? step : 1.0f);

  const auto encode = [&](const float(&v)[8], int at) {
    const int64_t element = start + at;
    const int left = min(size - at, 8);
    uint32_t halves[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (kScheme == kStochasticScheme) words = philox((element >> 2) + half, random);
      const uint32_t word[4] = {words.x, words.y, words.z, words.w};
      uint32_t code[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float place = divide(v[half * 4 + i] - range.low);
        if (kScheme == kStochasticScheme) place = round_up_by_chance(place, word[i]);
        if (kScheme == kShift) place = place - shift;
        // The bounds are whole numbers, so clamping before rounding is the same; without a draw or a shift the
        // quotient is in [0, levels] but for its last bit, which rounding takes back.
        if (kScheme != kNearest) place = fminf(fmaxf(place, 0.0f), levels);
        code[i] = __float_as_uint(place + kRoundingMagic) & 0xffu;
      }
      halves[half] = code[0] | code[1] << bits | code[2] << (2 * bits) | code[3] << (3 * bits);
    }
    uint64_t word = halves[0] | static_cast<uint64_t>(halves[1]) << (4 * bits);
    if (left < 8) word &= (uint64_t{1} << (left * bits)) - 1;
    store_packed(packed + element / 8 * bits, usable ? word : 0, (left * bits + 7) / 8, bits);
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = threadIdx.x * 8 + i * stride;
    float v[8];
    kept[i].unpack(v);
    if (at < size) encode(v, at);
  }
  for (int at = threadIdx.x * 8 + kKept * stride; at < size; at += stride) {
    float v[8];
    Raw8<T>::load_some(x + start + at, size - at, v);
    encode(v, at);
  }
}

// A warp takes a bucket. A thread writes 16 bytes: eight 16-bit values, or half a group of 32-bit ones.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    decode_kernel(const uint8_t* __restrict__ packed, const float* __restrict__ meta, int bits, int bucket_size,
                  int64_t count, int scheme, RandomKey random, bool vectors, T* __restrict__ out) {
  constexpr int kValues = 16 / sizeof(T);
  const int64_t bucket = static_cast<int64_t>(blockIdx.x) * (kMostThreads / 32) + threadIdx.x / 32;
  const int64_t start = bucket * bucket_size;
  if (start >= count) return;
  const int size = static_cast<int>(min(count - start, static_cast<int64_t>(bucket_size)));
  const float2 range = __ldg(reinterpret_cast<const float2*>(meta) + bucket);
  const float shift = scheme == kShift ? shift_of(bucket, random) : 0.0f;
  const uint32_t mask = (1u << bits) - 1;
  const uint8_t* codes = packed + start / 8 * bits;
#pragma unroll 4
  for (int at = (threadIdx.x & 31) * kValues; at < size; at += 32 * kValues) {
    const int group = at / 8, left = min(size - group * 8, 8), first = at & 7;
    const uint64_t word = load_packed(codes + group * bits, (left * bits + 7) / 8, bits) >> (first * bits);
    T values[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      float code = small_to_float(static_cast<uint32_t>(word >> (i * bits)) & mask);
      if (scheme == kShift) code = code + shift;
      values[i] = from_float<T>(range.x + range.y * code);
    }
    if (vectors && first + kValues <= left) {
      *reinterpret_cast<uint4*>(out + start + at) = *reinterpret_cast<const uint4*>(values);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        if (first + i < left) out[start + at + i] = values[i];
    }
  }
}

template <typename T>
int encode(const void* x, int64_t count, int bits, int bucket_size, int scheme, RandomKey random, void* packed,
           float* meta, cudaStream_t stream) {
  const int64_t buckets = ceil_div(count, static_cast<int64_t>(bucket_size));
  const int warps = min(ceil_div(bucket_size, 32 * 8 * kKept), kMostThreads / 32);
  const dim3 block(static_cast<unsigned>(warps * 32), static_cast<unsigned>(max(4 / warps, 1)));
  const int64_t blocks = ceil_div(buckets, int64_t{block.y});
  if (blocks > INT32_MAX) return kBadArgument;
  auto* kernel = scheme == kShift              ? encode_kernel<T, kShift>
                 : scheme == kStochasticScheme ? encode_kernel<T, kStochasticScheme>
                                               : encode_kernel<T, kNearest>;
  kernel<<<static_cast<unsigned>(blocks), block, 0, stream>>>(static_cast<const T*>(x), count, bits, bucket_size,
                                                             buckets, random, aligned(x, 16),
                                                             static_cast<uint8_t*>(packed), meta);
  return last_error();
}

template <typename T>
int decode(const void* packed, const float* meta, int bits, int bucket_size, int64_t count, int scheme,
           RandomKey random, void* out, cudaStream_t stream) {
  const int64_t buckets = ceil_div(count, static_cast<int64_t>(bucket_size));
  const int64_t blocks = ceil_div(buckets, int64_t{kMostThreads / 32});
  if (blocks > INT32_MAX) return kBadArgument;
  decode_kernel<T><<<static_cast<unsigned>(blocks), kMostThreads, 0, stream>>>(
      static_cast<const uint8_t*>(packed), meta, bits, bucket_size, count, scheme, random, aligned(out, 16),
      static_cast<T*>(out));
  return last_error();
}

bool wrong(int bits, int bucket_size) { return bits < 2 || bits > 8 || bucket_size < 8 || bucket_size % 8 != 0; }

}  // namespace

QSYNC_API int qsync_bucket_encode(const void* x, int element, int64_t count, int bits, int bucket_size, int scheme,
                                  uint64_t key, uint64_t tensor, void* packed, float* meta, cudaStream_t stream) {
  if (wrong(bits, bucket_size)) return kBadArgument;
  const RandomKey random = random_key(key, tensor);
  switch (element) {
    case kFloat32:
      return encode<float>(x, count, bits, bucket_size, scheme, random, packed, meta, stream);
    case kBFloat16:
      return encode<__nv_bfloat16>(x, count, bits, bucket_size, scheme, random, packed, meta, stream);
    case kFloat16:
      return encode<__half>(x, count, bits, bucket_size, scheme, random, packed, meta, stream);
    default:
      return kBadArgument;
  }
}

QSYNC_API int qsync_bucket_decode(const void* packed, const float* meta, int bits, int bucket_size, int64_t count,
                                  int scheme, uint64_t key, uint64_t tensor, void* out, int element,
                                  cudaStream_t stream) {
  if (wrong(bits, bucket_size)) return kBadArgument;
  const RandomKey random = random_key(key, tensor);
  switch (element) {
    case kFloat32:
      return decode<float>(packed, meta, bits, bucket_size, count, scheme, random, out, stream);
    case kBFloat16:
      return decode<__nv_bfloat16>(packed, meta, bits, bucket_size, count, scheme, random, out, stream);
    case kFloat16:
      return decode<__half>(packed, meta, bits, bucket_size, count, scheme, random, out, stream);
    default:
      return kBadArgument;
  }
}
