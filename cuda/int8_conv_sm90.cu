// Int8 convolution forward on Hopper as an implicit product: no unfolded copy of the input exists.
// x: NHWC; weight: [O][filter_h][filter_w][C]; out: [N, P, Q, O], all without gaps; one group.
#include "product_sm90.cuh"

using namespace qsync;

// window: the twelve numbers of `Window`, in its order.
QSYNC_API int qsync_int8_conv_sm90(const void* x, const void* weight, const float* x_scale, const float* weight_scale,
                                   const void* bias, int bias_element, void* out, int element, int64_t out_channels,
                                   const int* window, int columns, cudaStream_t stream) {
  const Window w = {window[0], window[1], window[2], window[3], window[4],  window[5],
                    window[6], window[7], window[8], window[9], window[10], window[11]};
  if (!w.fits_map()) return kNoSuchKernel;
  ProductShape p = {};
  p.out_height = w.out_height();
  p.out_width = w.out_width();
  const int64_t rows = static_cast<int64_t>(w.images) * p.out_height * p.out_width;
  const int64_t depth = static_cast<int64_t>(w.filter_h) * w.filter_w * w.channels;
  if (rows > INT32_MAX || out_channels > INT32_MAX || depth > INT32_MAX) return kBadArgument;
  p.epilogue = {x_scale, weight_scale, bias, 0, 1, bias_element, out, rows, out_channels};
  p.element = element;
  p.channel_steps = ceil_div(w.channels, kDepth);
  p.k_steps = w.filter_h * w.filter_w * p.channel_steps;
  p.channels = w.channels;
  p.filter_w = w.filter_w;
  p.dilation_h = w.dilation_h;
  p.dilation_w = w.dilation_w;
  p.stride_h = w.stride_h;
  p.stride_w = w.stride_w;
  p.pad_h = w.pad_h;
  p.pad_w = w.pad_w;
  CUtensorMap x_map;
  if (const int status = pixel_map(&x_map, x, w, kRows)) return status;
  if (columns == 256) return run_product<hopper::Int8, 256, 2, true>(x_map, weight, depth, p, stream);
  if (columns == 128) return run_product<hopper::Int8, 128, 2, true>(x_map, weight, depth, p, stream);
  return kBadArgument;
}
