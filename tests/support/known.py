"""A jitted function as another process knows it."""

from typing import Any

from fshard.compiler.identity import FunctionIdentity, identity_of
from fshard.compiler.jit import Jitted
from fshard.compiler.signature import flat_call, on_meshes, signature


def known(jitted: Jitted[Any, Any], *args: Any) -> FunctionIdentity:
    """What is compared of a function before its compiled form is loaded."""
    leaves, spec = flat_call(args, {})
    return identity_of(jitted._fn, signature(leaves, spec, on_meshes((args, {}))), jitted.options)
