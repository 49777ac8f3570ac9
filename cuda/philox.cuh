// Counter-based random bits: Philox4x32-10 (Salmon et al., SC 2011). A block serves four elements by words, or eight
// by halves of words: word i % 4 of block i / 4 belongs to element i, or half i % 2 of word i / 2 % 4 of block i / 8,
// as in qsync_opt/kernels/rounding.py: bit-equal.
#pragma once

#include <cstdint>

namespace qsync {

struct RandomKey {
  uint32_t key[2];     // of (seed, step)
  uint32_t tensor[2];  // low and high word
};

inline RandomKey random_key(uint64_t key, uint64_t tensor) {
  return {{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)},
          {static_cast<uint32_t>(tensor), static_cast<uint32_t>(tensor >> 32)}};
}

__device__ __forceinline__ uint4 philox(uint64_t block, const RandomKey& random) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32);
  uint32_t c2 = random.tensor[0], c3 = random.tensor[1], k0 = random.key[0], k1 = random.key[1];
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

// A number in [0, 1) from the upper 24 bits of a word.
__device__ __forceinline__ float uniform(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

// The number of one element, where elements are not taken by fours.
__device__ __forceinline__ float uniform_of(uint64_t element, const RandomKey& random) {
  const uint4 words = philox(element >> 2, random);
  const uint32_t place = element & 3;
  return uniform(place == 0 ? words.x : place == 1 ? words.y : place == 2 ? words.z : words.w);
}

}  // namespace qsync
