// The int8 product on Hopper. K must be a multiple of 16 and a, b 16-byte aligned.
#include "product_sm90.cuh"

using namespace qsync;

// columns: 128 or 256 of a tile; cluster: 1 or 2 blocks that share tiles of b.
QSYNC_API int qsync_int8_product_sm90(const void* a, const void* b, const float* a_scale, const float* b_scale,
                                      const void* bias, int bias_element, void* out, int element, int64_t m, int64_t n,
                                      int64_t k, int a_step, int b_step, int columns, int cluster,
                                      cudaStream_t stream) {
  if (k % 16 != 0 || m > INT32_MAX || n > INT32_MAX || k > INT32_MAX) return kBadArgument;
  ProductShape p = {};
  p.epilogue = {a_scale, b_scale, bias, a_step, b_step, bias_element, out, m, n};
  p.element = element;
  p.k_steps = static_cast<int>(ceil_div(k, int64_t{kDepth}));
  CUtensorMap a_map;
  if (const int status = matrix_map(&a_map, a, kInt8, m, k, kRows)) return status;
  if (columns == 256 && cluster == 2) return run_product<hopper::Int8, 256, 2, false>(a_map, b, k, p, stream);
  if (columns == 128 && cluster == 2) return run_product<hopper::Int8, 128, 2, false>(a_map, b, k, p, stream);
  if (columns == 256 && cluster == 1) return run_product<hopper::Int8, 256, 1, false>(a_map, b, k, p, stream);
  if (columns == 128 && cluster == 1) return run_product<hopper::Int8, 128, 1, false>(a_map, b, k, p, stream);
  return kBadArgument;
}
