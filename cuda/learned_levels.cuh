// Learned levels for encoding: a table of increasing numbers from 0 to 1 bends [0, 1] so that they lie at 0, 1, 2 ...
#pragma once

#include "bucket_codes.cuh"

namespace qsync {

// In shared memory. A search tree over the intervals between levels has its root at 1, and the children of node i at
// 2i and 2i + 1; what is left after `bits` steps down is the interval.
struct LearnedLevels {
  float node[kMostLearned];
  float2 interval[kMostLearned];  // its lower end, and one over its length

  // By all threads of a block; the table has 2^bits levels.
  __device__ __forceinline__ void fill(const float* __restrict__ table, int bits) {
    const int levels = 1 << bits, threads = blockDim.x * blockDim.y;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < levels; i += threads) {
      const float below = __ldg(table + i);
      interval[i] = make_float2(below, i < levels - 1 ? 1.0f / (__ldg(table + i + 1) - below) : 0.0f);
      if (i == 0) continue;
      const int depth = 31 - __clz(i), rank = (2 * (i - (1 << depth)) + 1) << (bits - 1 - depth);
      // One more leaf than there are intervals: nothing is as far up as the last.
      node[i] = rank < levels - 1 ? __ldg(table + rank) : INFINITY;
    }
    __syncthreads();
  }

  // Places in [0, 1] to places in [0, 2^bits - 1].
  __device__ __forceinline__ void bend(float (&place)[8], int bits) const {
    const float root = node[1], left = node[2], right = node[3];
    int at[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool up = place[i] >= root;
      at[i] = (up ? 6 : 4) + (place[i] >= (up ? right : left));
    }
#pragma unroll 1
    for (int depth = 2; depth < bits; ++depth) {
#pragma unroll
      for (int i = 0; i < 8; ++i) at[i] = 2 * at[i] + (place[i] >= node[at[i]]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int index = at[i] - (1 << bits);
      const float2 own = interval[index];
      place[i] = small_to_float(index) + (place[i] - own.x) * own.y;
    }
  }
};

}  // namespace qsync
