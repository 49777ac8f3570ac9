"""Running a plan: precision-aware operators, and patching a model by their names.

`convert`, `revert` and `set_step` (module `convert`) are the front door. From there down:
`assignment` and `targets` (what a name stands for and what becomes of it), `layers` (what a
module becomes), `calls` and `functions` (operators that are plain calls), `operators` (each
operator as a function), `products`, `convolutions` and `batched` (the autograd functions),
`session` and `casts` (what operators share), `arithmetic` and `fp32` (products of floats), and
`availability` (what a device can run).
"""
