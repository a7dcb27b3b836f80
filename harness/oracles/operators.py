"""The aten operators that the oracles know, by name without overload and trailing underscore.

Both oracles share one table. An operator without an entry is unproven for :mod:`harness.oracles.proof`, and rounds its
results for :mod:`harness.oracles.rounding`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Proof = Literal[
    "", "empty", "view", "moves", "whole", "product", "added", "product_added", "summed",
    "scattered", "averaged", "divided", "power", "negated", "masked", "convolved", "convolved_back", "put",
]  # fmt: skip


class Operator(NamedTuple):
    """The properties of an operator that the proof of exactness and the rounding bound use."""

    proof: Proof = ""
    """How the proof follows it; empty if it cannot.

    ``empty``: it makes tensors without values.  ``view``: results lie in the operand's storage.  ``moves``: it is
    linear, and results are elements of operands or numbers among its arguments.  ``whole``: it is exact and not linear,
    so ranks, too, give it whole values; or it makes values.  Anything else is the rule of that name in
    :mod:`harness.oracles.proof_rules`.
    """
    rounds: bool = True
    """Whether results are rounded; if not, they are numbers from the inputs, or zero."""
    takes_numbers: bool = False
    """Whether whole numbers among the arguments may become elements of the result."""
    own_precision: bool = False
    """Whether a sum is accumulated in the tensor's own dtype, one addition at a time, and not in float32."""
    factors: int = 3
    """How many leading operands get rounding errors; an error in one factor is an error in the product."""
    cancels: bool = False
    """Whether a sum inside it cancels, so that the error is relative to the first operand and not to the result."""


OPERATORS: dict[str, Operator] = {
    "abs": Operator("whole", rounds=False),
    "add": Operator("added"),
    "addbmm": Operator("product_added"),
    "addcmul": Operator("product_added"),
    "addmm": Operator("product_added", factors=2),
    "addmv": Operator("product_added"),
    "addr": Operator("product_added"),
    "alias": Operator("view", rounds=False),
    "all": Operator("whole"),
    "amax": Operator("whole"),
    "amin": Operator("whole"),
    "aminmax": Operator("whole"),
    "any": Operator("whole"),
    "arange": Operator("whole"),
    "argmax": Operator("whole", rounds=False),
    "argmin": Operator("whole", rounds=False),
    "argsort": Operator("whole"),
    "as_strided": Operator("view"),
    "baddbmm": Operator("product_added", factors=2),
    "bitwise_and": Operator("whole"),
    "bitwise_not": Operator("whole"),
    "bitwise_or": Operator("whole"),
    "bitwise_xor": Operator("whole"),
    "bmm": Operator("product", factors=1),
    "broadcast_to": Operator(rounds=False),
    "cat": Operator("moves", rounds=False),
    "ceil": Operator("whole"),
    "clamp": Operator("whole", rounds=False),
    "clamp_max": Operator("whole", rounds=False),
    "clamp_min": Operator("whole", rounds=False),
    "clone": Operator("moves", rounds=False),
    "col2im": Operator("summed"),
    "constant_pad_nd": Operator("moves", rounds=False, takes_numbers=True),
    "convolution": Operator("convolved", factors=1),
    "convolution_backward": Operator("convolved_back", factors=1),
    "copy": Operator("moves", rounds=False),
    "count_nonzero": Operator("whole"),
    "cummax": Operator("whole"),
    "cummin": Operator("whole"),
    "cumsum": Operator("summed"),
    "detach": Operator("view", rounds=False),
    "diagonal": Operator("view"),
    "diagonal_backward": Operator("summed"),
    "div": Operator("divided"),
    "dot": Operator("product"),
    "embedding": Operator("moves", rounds=False),
    "embedding_dense_backward": Operator("summed", own_precision=True),
    "empty": Operator("empty"),
    "empty_like": Operator("empty", rounds=False),
    "empty_strided": Operator("empty"),
    "eq": Operator("whole"),
    "equal": Operator("whole"),
    "expand": Operator("view", rounds=False),
    "eye": Operator("whole"),
    "fill": Operator("moves", rounds=False, takes_numbers=True),
    "flip": Operator("moves", rounds=False),
    "floor": Operator("whole"),
    "full": Operator("whole"),
    "full_like": Operator("whole", rounds=False),
    "gather": Operator("moves", rounds=False),
    "ge": Operator("whole"),
    "gelu": Operator(cancels=True),
    "gelu_backward": Operator(cancels=True),
    "gt": Operator("whole"),
    "hardtanh": Operator("whole", rounds=False),
    "heaviside": Operator(rounds=False),
    "im2col": Operator("moves"),
    "index": Operator("moves", rounds=False),
    "index_add": Operator("scattered", own_precision=True),
    "index_copy": Operator("moves"),
    "index_fill": Operator("moves", rounds=False, takes_numbers=True),
    "index_put": Operator("put", own_precision=True),
    "_index_put_impl": Operator("put"),
    "index_select": Operator("moves", rounds=False),
    "is_nonzero": Operator("whole"),
    "is_same_size": Operator("whole"),
    "isfinite": Operator("whole"),
    "isinf": Operator("whole"),
    "isnan": Operator("whole"),
    "kthvalue": Operator("whole"),
    "le": Operator("whole"),
    "lift": Operator(rounds=False),
    "lift_fresh": Operator("view", rounds=False),
    "_local_scalar_dense": Operator("whole"),
    "logical_and": Operator("whole"),
    "logical_not": Operator("whole"),
    "logical_or": Operator("whole"),
    "logical_xor": Operator("whole"),
    "lt": Operator("whole"),
    "masked_fill": Operator("moves", rounds=False, takes_numbers=True),
    "masked_scatter": Operator("moves"),
    "masked_select": Operator("moves", rounds=False),
    "max": Operator("whole", rounds=False),
    "max_pool2d_with_indices": Operator("whole", rounds=False),
    "max_pool2d_with_indices_backward": Operator("masked"),
    "max_pool3d_with_indices": Operator(rounds=False),
    "maximum": Operator("whole", rounds=False),
    "mean": Operator("averaged"),
    "min": Operator("whole", rounds=False),
    "minimum": Operator("whole", rounds=False),
    "mm": Operator("product", factors=1),
    "mul": Operator("product"),
    "mv": Operator("product"),
    "nan_to_num": Operator(rounds=False),
    "ne": Operator("whole"),
    "neg": Operator("negated", rounds=False),
    "new_empty": Operator("empty", rounds=False),
    "new_empty_strided": Operator("empty", rounds=False),
    "new_full": Operator("whole", rounds=False),
    "new_ones": Operator("whole", rounds=False),
    "new_zeros": Operator("whole", rounds=False),
    "nonzero": Operator("whole", rounds=False),
    "ones": Operator("whole"),
    "ones_like": Operator("whole", rounds=False),
    "permute": Operator("view"),
    "pow": Operator("power"),
    "relu": Operator("whole", rounds=False),
    "repeat": Operator("moves", rounds=False),
    "_reshape_alias": Operator("view"),
    "roll": Operator("moves", rounds=False),
    "round": Operator("whole"),
    "rsub": Operator("added"),
    "scalar_tensor": Operator("whole"),
    "scatter": Operator("moves", rounds=False, takes_numbers=True),
    "scatter_add": Operator("summed", own_precision=True),
    "scatter_reduce": Operator(own_precision=True),
    "select": Operator("view"),
    "select_backward": Operator("summed", rounds=False),
    "select_scatter": Operator("moves", rounds=False),
    "sgn": Operator("whole", rounds=False),
    "sign": Operator("whole", rounds=False),
    "silu_backward": Operator(cancels=True),
    "slice": Operator("view"),
    "slice_backward": Operator("summed", rounds=False),
    "slice_scatter": Operator("moves", rounds=False),
    "sort": Operator("whole", rounds=False),
    "split": Operator("view"),
    "split_with_sizes": Operator("view"),
    "squeeze": Operator("view"),
    "stack": Operator("moves", rounds=False),
    "sub": Operator("added"),
    "sum": Operator("summed"),
    "t": Operator("view"),
    "take": Operator(rounds=False),
    "threshold": Operator("whole", rounds=False),
    "threshold_backward": Operator("masked", rounds=False),
    "_to_copy": Operator("moves", rounds=False),
    "topk": Operator("whole", rounds=False),
    "trace": Operator("summed"),
    "transpose": Operator("view"),
    "tril": Operator("moves", rounds=False),
    "triu": Operator("moves", rounds=False),
    "trunc": Operator("whole"),
    "unbind": Operator("view"),
    "unfold": Operator("view"),
    "unfold_backward": Operator("summed"),
    "_unsafe_view": Operator("view", rounds=False),
    "unsqueeze": Operator("view"),
    "vdot": Operator("product"),
    "view": Operator("view"),
    "where": Operator("moves", rounds=False, takes_numbers=True),
    "zero": Operator("moves", rounds=False),
    "zeros": Operator("whole"),
    "zeros_like": Operator("whole", rounds=False),
}


def followed(proof: Proof) -> frozenset[str]:
    """Return the operators that the proof follows in this way."""
    return frozenset(name for name, operator in OPERATORS.items() if operator.proof == proof)


__all__ = ["OPERATORS", "Operator", "Proof", "followed"]
