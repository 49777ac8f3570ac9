// From real numbers to 8-bit codes and back: scale, exact quotient, rounding, vectors of eight.
#pragma once

#include <cfloat>
#include <cstring>
#include <type_traits>

#include "common.cuh"
#include "philox.cuh"

namespace qsync {

struct Int8Code {
  static constexpr float kMax = 127.0f;
};
struct E4M3Code {
  static constexpr float kMax = 448.0f;
  static constexpr int kMantissaBits = 3, kLeastExponent = -6;
  static constexpr __nv_fp8_interpretation_t kFormat = __NV_E4M3;
};
struct E5M2Code {
  static constexpr float kMax = 57344.0f;
  static constexpr int kMantissaBits = 2, kLeastExponent = -14;
  static constexpr __nv_fp8_interpretation_t kFormat = __NV_E5M2;
};

// Fp8 is rounded in hardware from compute capability 8.9 on, and only there by these kernels.
inline bool device_has_fp8() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major * 10 + minor >= 89;
}

template <typename Code> __device__ __forceinline__ float scale_of(uint32_t amax_bits) {
  const float amax = __uint_as_float(amax_bits);
  if (amax_bits == 0) return 1.0f;
  if (amax_bits >= 0x7f800000u) return amax;  // infinity and NaN: every value read back is NaN
  return fmaxf(amax / Code::kMax, FLT_MIN);
}

// x / scale, correctly rounded, in five instructions where the residual cannot underflow: two
// corrections with the reciprocal (Markstein, "Computation of elementary functions", 1990).
struct Divider {
  float scale, reciprocal;
  bool usable, plain;

  __device__ __forceinline__ explicit Divider(float s) : scale(s), reciprocal(1.0f / s) {
    usable = (__float_as_uint(s) & 0x7f800000u) != 0x7f800000u;
    plain = s < 0x1p-80f || s > 0x1p100f;
  }

  __device__ __forceinline__ static float divide(float x, float scale, float reciprocal) {
    float q = x * reciprocal;
    q = fmaf(fmaf(-q, scale, x), reciprocal, q);
    return fmaf(fmaf(-q, scale, x), reciprocal, q);
  }
  __device__ __forceinline__ float operator()(float x) const {
    return plain ? x / scale : divide(x, scale, reciprocal);
  }
};

template <typename Code> __device__ __forceinline__ float clamp(float v) {
  return fminf(fmaxf(v, -Code::kMax), Code::kMax);
}

// Adding it to |v| < 2^22 rounds v to the nearest integer, ties to even, and leaves that in the low bits. The
// conversion instructions run at an eighth of the rate of an addition.
constexpr float kRoundingMagic = 12582912.0f;  // 1.5 * 2^23

// An integer below 2^23 as a float.
__device__ __forceinline__ float small_to_float(uint32_t v) { return __uint_as_float(0x4b000000u | v) - 8388608.0f; }

// v rounded down or up, |v| < 2^22.
__device__ __forceinline__ float round_up_by_chance(float v, uint32_t word) {
  const float nearest = v + kRoundingMagic - kRoundingMagic;
  const float below = nearest > v ? nearest - 1.0f : nearest;
  return below + (uniform(word) < v - below ? 1.0f : 0.0f);  // a sum, so that -0 becomes 0
}

template <typename Code> struct Rounder {
  // Between neighbours of the format: their distance is a power of two.
  __device__ __forceinline__ static float by_chance(float v, uint32_t word) {
    v = clamp<Code>(v);
    int exponent = static_cast<int>((__float_as_uint(v) >> 23) & 0xff) - 127;
    exponent = max(exponent, Code::kLeastExponent) - Code::kMantissaBits;
    const float step = __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
    const float inverse = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
    return round_up_by_chance(v * inverse, word) * step;
  }
  __device__ __forceinline__ static uint32_t pack(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    return 0;  // never launched, see device_has_fp8: the emulation is long, and the products are not there
#endif
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, Code::kFormat);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, Code::kFormat);
    return low | (high << 16);
  }
};

template <> struct Rounder<Int8Code> {
  __device__ __forceinline__ static float by_chance(float v, uint32_t word) {
    return round_up_by_chance(clamp<Int8Code>(v), word);
  }
  __device__ __forceinline__ static uint32_t pack(float a, float b, float c, float d) {
    return pack_rounded(a + kRoundingMagic, b + kRoundingMagic, c + kRoundingMagic, d + kRoundingMagic);
  }
  // The low bytes of sums with the magic number.
  __device__ __forceinline__ static uint32_t pack_rounded(float a, float b, float c, float d) {
    const uint32_t low = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
    const uint32_t high = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
    return __byte_perm(low, high, 0x5410);
  }
};

// Codes of four elements; `block` is the index of the first over four, for the random bits.
template <typename Code, bool kStochastic>
__device__ __forceinline__ uint32_t encode4(float a, float b, float c, float d, uint64_t block,
                                            const RandomKey& random) {
  if constexpr (kStochastic) {
    const uint4 words = philox(block, random);
    a = Rounder<Code>::by_chance(a, words.x);
    b = Rounder<Code>::by_chance(b, words.y);
    c = Rounder<Code>::by_chance(c, words.z);
    d = Rounder<Code>::by_chance(d, words.w);
  }
  return Rounder<Code>::pack(a, b, c, d);
}

template <typename Code>
__device__ __forceinline__ uint8_t encode1(float v, bool stochastic, uint64_t element, const RandomKey& random) {
  if (stochastic) {
    const uint4 words = philox(element >> 2, random);
    const uint32_t place = element & 3;
    v = Rounder<Code>::by_chance(v, place == 0 ? words.x : place == 1 ? words.y : place == 2 ? words.z : words.w);
  }
  return static_cast<uint8_t>(Rounder<Code>::pack(v, 0.0f, 0.0f, 0.0f));
}

// Eight neighbouring elements as they lie in memory.
template <typename T> struct Raw8 {
  static constexpr int kWords = sizeof(T) / 2;  // of 16 bytes
  uint4 word[kWords];

  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = __ldg(reinterpret_cast<const uint4*>(p) + i);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void unpack(float (&v)[8]) const {
    const T* elements = reinterpret_cast<const T*>(word);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = to_float(elements[i]);
  }
  // Eight with bounds: elements past `count` are 0. For rows that are not 16-byte aligned.
  __device__ __forceinline__ static void load_some(const T* p, int count, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = i < count ? to_float(p[i]) : 0.0f;
  }
};

// Largest magnitude of elements as they lie in memory, without unpacking 16-bit ones: their bits without the
// sign are ordered as the magnitudes are, two a word.
template <typename T> struct RawMax {
  uint32_t most = 0;
  __device__ __forceinline__ void add(const Raw8<T>& raw) {
#pragma unroll
    for (int i = 0; i < Raw8<T>::kWords; ++i) {
      add_word(raw.word[i].x), add_word(raw.word[i].y), add_word(raw.word[i].z), add_word(raw.word[i].w);
    }
  }
  __device__ __forceinline__ void add_word(uint32_t word) {
    if constexpr (sizeof(T) == 4) most = max(most, word & 0x7fffffffu);
    else most = __vmaxu2(most, word & 0x7fff7fffu);
  }
  // As the bits of a float32 magnitude.
  __device__ __forceinline__ uint32_t bits() const {
    if constexpr (sizeof(T) == 4) return most;
    const uint16_t half = static_cast<uint16_t>(max(most & 0xffffu, most >> 16));
    T value;
    memcpy(&value, &half, sizeof value);
    return magnitude(to_float(value));
  }
};

__device__ __forceinline__ uint32_t magnitude8(const float (&v)[8], uint32_t most) {
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max(most, magnitude(v[i]));
  return most;
}

// Nearest int8 codes of eight elements in four instructions each instead of a division: the product with the
// reciprocal is off by less than 2^-16, so it rounds as the quotient does unless it is that close to the
// middle between two integers; then all eight are divided.
__device__ __forceinline__ uint2 nearest_int8(const float (&v)[8], const Divider& divide) {
  constexpr float kMiddle = 0.5f - 0x1p-15f;
  float q[8], farthest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    q[i] = fmaf(v[i], divide.reciprocal, kRoundingMagic);
    farthest = fmaxf(farthest, fabsf(fmaf(v[i], divide.reciprocal, -(q[i] - kRoundingMagic))));
  }
  if (farthest > kMiddle) {
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = divide(v[i]) + kRoundingMagic;
  }
  uint2 codes;
  codes.x = Rounder<Int8Code>::pack_rounded(q[0], q[1], q[2], q[3]);
  codes.y = Rounder<Int8Code>::pack_rounded(q[4], q[5], q[6], q[7]);
  return divide.usable ? codes : make_uint2(0, 0);
}

template <typename Code, bool kStochastic>
__device__ __forceinline__ uint2 encode8(const float (&v)[8], const Divider& divide, uint64_t element,
                                         const RandomKey& random) {
  if constexpr (std::is_same_v<Code, Int8Code> && !kStochastic) {
    return nearest_int8(v, divide);
  } else {
    float q[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = divide(v[i]);
    uint2 codes;
    codes.x = encode4<Code, kStochastic>(q[0], q[1], q[2], q[3], element >> 2, random);
    codes.y = encode4<Code, kStochastic>(q[4], q[5], q[6], q[7], (element >> 2) + 1, random);
    return divide.usable ? codes : make_uint2(0, 0);
  }
}

}  // namespace qsync
