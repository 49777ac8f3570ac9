// Layers in float precisions as autograd functions without Python: `FloatLinear` and `FloatConv2d` of qsync_opt/runtime,
// to the bit, for about half of the host's time. A GPU would else wait for it: launching a layer and its gradients takes
// Python longer than an H200 takes to compute them.
//
// The Python functions say what is computed, and run where there is no compiler, under torch.compile, and where flags
// of the process have to be set for fp32 or tf32.
#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

namespace {

using at::ScalarType;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Operators inside are those of the plan, whatever autocast there is around, and are not differentiated.
struct Plain {
  c10::impl::ExcludeDispatchKeyGuard without_autocast{c10::autocast_dispatch_keyset};
  at::NoGradGuard without_grad;
};

Tensor as_dtype(const Tensor& x, ScalarType dtype) { return x.scalar_type() == dtype ? x : x.to(dtype); }

std::optional<Tensor> as_dtype(const std::optional<Tensor>& x, ScalarType dtype) {
  if (!x || !x->defined()) return std::nullopt;
  return as_dtype(*x, dtype);
}

// A tensor [..., N] as a matrix.
Tensor rows_of(const Tensor& x) {
  if (x.dim() == 2) return x;
  return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

// The product a @ b in fp32, not rounded to the 16 bits of its operands in between.
Tensor wide_product(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() == at::kFloat) return at::mm(a, b);
  if (a.is_cuda()) return at::mm(a, b, at::kFloat);
  return at::mm(a.to(at::kFloat), b.to(at::kFloat));
}

// What backward needs beside the tensors that are kept. It is kept as a list of integers, which compiled autograd can
// compare: three dtypes of operands, that of the product, groups, and then lists, each after its length.
struct Facts {
  ScalarType input, weight, bias = ScalarType::Undefined;
  ScalarType dtype;  // of the product
  int64_t groups = 1;
  std::vector<int64_t> shape, weight_shape, weight_stride;
  std::vector<int64_t> stride, padding, dilation;  // of a convolution

  bool has_bias() const { return bias != ScalarType::Undefined; }

  std::vector<int64_t> pack() const {
    std::vector<int64_t> all = {static_cast<int64_t>(input), static_cast<int64_t>(weight), static_cast<int64_t>(bias),
                                static_cast<int64_t>(dtype), groups};
    for (const auto* list : {&shape, &weight_shape, &weight_stride, &stride, &padding, &dilation}) {
      all.push_back(static_cast<int64_t>(list->size()));
      all.insert(all.end(), list->begin(), list->end());
    }
    return all;
  }

  explicit Facts(const std::vector<int64_t>& all)
      : input(static_cast<ScalarType>(all[0])),
        weight(static_cast<ScalarType>(all[1])),
        bias(static_cast<ScalarType>(all[2])),
        dtype(static_cast<ScalarType>(all[3])),
        groups(all[4]) {
    auto from = all.begin() + 5;
    for (auto* list : {&shape, &weight_shape, &weight_stride, &stride, &padding, &dilation}) {
      list->assign(from + 1, from + 1 + *from);
      from += 1 + *from;
    }
  }

  Facts(const Tensor& x, const Tensor& weights, const std::optional<Tensor>& biases, const Tensor& operand)
      : input(x.scalar_type()),
        weight(weights.scalar_type()),
        dtype(operand.scalar_type()),
        shape(x.sizes().vec()),
        weight_shape(weights.sizes().vec()),
        weight_stride(weights.strides().vec()) {
    if (biases && biases->defined()) bias = biases->scalar_type();
  }
};

// Keeps what backward reads: the operand that was multiplied, and the parameter itself.
void remember(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& operand, const Facts& facts) {
  ctx->save_for_backward({weight.requires_grad() ? operand : Tensor(), x.requires_grad() ? weight : Tensor()});
  ctx->saved_data["facts"] = facts.pack();
}

Facts recall(const AutogradContext* ctx) { return Facts(ctx->saved_data.at("facts").toIntVector()); }

// Gradients are numbers, and asking for theirs is an error, whatever the gradient that was given: see `once.py`.
variable_list once(variable_list gradients) {
  if (!at::GradMode::is_enabled()) return gradients;
  for (auto& grad : gradients)
    if (grad.defined()) grad = grad.detach().set_requires_grad(true);
  const auto count = static_cast<int64_t>(gradients.size());
  const auto error = std::make_shared<torch::autograd::DelayedError>(
      "trying to differentiate twice a layer that is differentiable once; run it in fp32", count);
  return (*error)(std::move(gradients));
}

struct FloatLinear : torch::autograd::Function<FloatLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& cast) {
    const Plain plain;
    const Tensor operand = cast && cast->defined() ? *cast : x;
    const ScalarType dtype = operand.scalar_type();
    remember(ctx, x, weight, operand, Facts(x, weight, bias, operand));
    const Tensor out = at::linear(rows_of(operand), as_dtype(weight, dtype), as_dtype(bias, dtype));
    if (x.dim() == 2) return out;
    auto shape = x.sizes().vec();
    shape.back() = out.size(-1);
    return at::_unsafe_view(out, shape);  // no view: what follows may write into it
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Facts facts = recall(ctx);
    const auto saved = ctx->get_saved_variables();
    Tensor grad_x, grad_weight, grad_bias;
    {
      const Plain plain;
      const Tensor rows = as_dtype(rows_of(grads[0]), facts.dtype);
      if (ctx->needs_input_grad(0))
        grad_x = as_dtype(at::mm(rows, as_dtype(saved[1], facts.dtype)).view(facts.shape), facts.input);
      if (ctx->needs_input_grad(1))
        grad_weight = as_dtype(wide_product(rows.t(), rows_of(saved[0])), facts.weight);
      if (facts.has_bias() && ctx->needs_input_grad(2))
        grad_bias = as_dtype(rows.sum(0, false, at::kFloat), facts.bias);
    }
    return once({grad_x, grad_weight, grad_bias, Tensor()});
  }
};

// The operand, or where it was not kept a stand-in of its shape without memory.
Tensor or_shape(const Tensor& operand, at::IntArrayRef shape, const Tensor& like) {
  return operand.defined() ? operand : like.new_empty({1}).expand(shape);
}

// The gradient with the strides of the weight, which DDP compares to the last: libraries choose those of dimensions of
// size 1, and may choose others for all.
Tensor strided(const Tensor& grad, const Facts& facts) {
  const auto& wanted = facts.weight_stride;
  if (grad.strides() == at::IntArrayRef(wanted) || std::count(wanted.begin(), wanted.end(), 0)) return grad;
  bool is_same = true;
  for (int64_t i = 0; i < grad.dim(); ++i) is_same &= grad.size(i) == 1 || grad.stride(i) == wanted[i];
  if (is_same) return grad.as_strided(facts.weight_shape, wanted);
  return grad.new_empty_strided(facts.weight_shape, wanted).copy_(grad);
}

struct FloatConv2d : torch::autograd::Function<FloatConv2d> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& cast, std::vector<int64_t> stride, std::vector<int64_t> padding,
                        std::vector<int64_t> dilation, int64_t groups) {
    const Plain plain;
    const Tensor operand = cast && cast->defined() ? *cast : x;
    const ScalarType dtype = operand.scalar_type();
    Facts facts(x, weight, bias, operand);
    facts.stride = stride;
    facts.padding = padding;
    facts.dilation = dilation;
    facts.groups = groups;
    remember(ctx, x, weight, operand, facts);
    return at::conv2d(operand, as_dtype(weight, dtype), as_dtype(bias, dtype), stride, padding, dilation, groups);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Facts facts = recall(ctx);
    const auto saved = ctx->get_saved_variables();
    const bool needs_x = ctx->needs_input_grad(0), needs_weight = ctx->needs_input_grad(1);
    Tensor grad_x, grad_weight, grad_bias;
    {
      const Plain plain;
      const Tensor cast = as_dtype(grads[0], facts.dtype);
      if (needs_x || needs_weight)
        std::tie(grad_x, grad_weight, std::ignore) = at::convolution_backward(
            cast, or_shape(saved[0], facts.shape, cast),
            as_dtype(or_shape(saved[1], facts.weight_shape, cast), facts.dtype), std::nullopt,
            facts.stride, facts.padding, facts.dilation, false, {0, 0}, facts.groups, {needs_x, needs_weight, false});
      grad_x = needs_x ? as_dtype(grad_x, facts.input) : Tensor();
      grad_weight = needs_weight ? strided(as_dtype(grad_weight, facts.weight), facts) : Tensor();
      if (facts.has_bias() && ctx->needs_input_grad(2))
        grad_bias = as_dtype(grads[0].sum({0, 2, 3}, false, at::kFloat), facts.bias);
    }
    return once({grad_x, grad_weight, grad_bias, {}, {}, {}, {}, {}});
  }
};

Tensor float_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& cast) {
  return FloatLinear::apply(x, weight, bias, cast);
}

Tensor float_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& cast, at::IntArrayRef stride, at::IntArrayRef padding,
                    at::IntArrayRef dilation, int64_t groups) {
  return FloatConv2d::apply(x, weight, bias, cast, stride.vec(), padding.vec(), dilation.vec(), groups);
}

TORCH_LIBRARY_FRAGMENT(qsync_opt, m) {
  m.def("float_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? cast) -> Tensor", float_linear);
  m.def(
      "float_conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? cast, int[2] stride, int[2] padding,"
      " int[2] dilation, int groups) -> Tensor",
      float_conv2d);
}

}  // namespace
