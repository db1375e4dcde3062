"""A jitted function as another process knows it."""

from typing import Any

from fshard.compiler.identity import FunctionIdentity, identity
from fshard.compiler.jit import Jitted
from fshard.compiler.signature import flatten, on_meshes, signature


def known(jitted: Jitted[Any, Any], *args: Any) -> FunctionIdentity:
    """What is compared of a function before its compiled form is loaded."""
    leaves, spec = flatten(args, {})
    return identity(jitted._fn, signature(leaves, spec, on_meshes((args, {}))), jitted.options)
