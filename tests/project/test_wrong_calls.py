"""A table of wrong calls: each ends in an error that names the argument or leaf, what came, and what was expected."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.says import says
from support.worlds import gloo, simulated
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import fshard
from fshard import optim, testing, wire
from fshard.comm import consensus

Call = Callable[[], Any]


def params() -> dict[str, Tensor]:
    """Two leaves."""
    return {"w": torch.ones(3), "b": torch.zeros(3)}


def loss(p: Any, x: Tensor) -> Tensor:
    """A plain scalar of all leaves."""
    return (p["w"] * x + p["b"]).sum()


PLAN = fshard.make_plan(params())
SHARDED = fshard.shard_params(params(), PLAN)
TX = optim.sgd(0.1)
STATE = fshard.init_state(SHARDED, TX)
STEP = fshard.train_step(loss, TX)
X = torch.ones(1, 3)
SCALER = fshard.DynamicLossScale(8.0)
FOUND = torch.zeros(())
MEAN = fshard.Mean(FOUND, 1)
MODULE = nn.Linear(2, 2)
INFERENCE = torch.inference_mode()


def plan(mesh: Any = None, **kwargs: Any) -> fshard.Plan:
    """A plan of the two leaves."""
    return fshard.make_plan(params(), mesh, **kwargs)


def leaf(x: Any) -> fshard.Plan:
    """A plan of a tree in which one leaf is wrong."""
    return fshard.make_plan({"a": torch.ones(2), "b": [x]})


def quantised() -> Tensor:
    """A leaf of 8 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 will drop these dtypes
        return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


def scheduled(schedule: Any) -> Any:
    """An update whose learning rate comes from this schedule."""
    tx = optim.sgd(schedule)
    return tx.update(params(), tx.init(params()), params())


def inferring(call: Call) -> Any:
    """The call under torch.inference_mode."""
    with torch.inference_mode():
        return call()


T, V = TypeError, ValueError
# Name of the case: the call, the class of the error, and words of its message, in this order.
WRONG: dict[str, tuple[Call, type[Exception], tuple[str, ...]]] = {
    # --- make_plan
    "mesh=4": (lambda: plan(4), T, ("mesh: expected a DeviceMesh", "None (one device)", "got 4", "init_device_mesh(")),
    "mesh=dict": (lambda: fshard.make_plan(None, params()), T, ("mesh: expected a DeviceMesh", "of type dict")),
    "params=mesh": (lambda: fshard.make_plan(fshard.AbstractMesh(shard=2)), V, ("leaf ''", "got AbstractMesh")),
    "params=module": (
        lambda: fshard.make_plan(MODULE),
        V,
        ("leaf ''", "got Linear", "fshard.module.functionalize(module)"),
    ),
    "params=class": (lambda: fshard.make_plan(nn.Linear), V, ("leaf ''", "expected a tensor", "got type")),
    "params=Sharded": (lambda: fshard.make_plan(SHARDED), T, ("params=", "Sharded", "whole tensors", "gather_params")),
    "params=Plan": (lambda: fshard.make_plan(PLAN), T, ("params=", "Plan", "whole tensors", "order")),
    "a number": (
        lambda: leaf(0.5),
        V,
        ("leaf 'b.0'", "got float", "fshard.tree.static()", "@fshard.tree.node", "optree"),
    ),
    "numpy": (lambda: leaf(X.numpy()), V, ("leaf 'b.0'", "expected a tensor", "got ndarray")),
    "sparse": (lambda: leaf(torch.eye(2).to_sparse()), V, ("leaf 'b.0'", "dense", "sparse_coo", ".to_dense()")),
    "quantised": (
        lambda: leaf(quantised()),
        V,
        ("leaf 'b.0'", "no quantised tensor", "qint8", ".dequantize()"),
    ),
    "units=1.5": (lambda: plan(units=1.5), T, ("units=1.5", "path patterns", "predicate", "number of elements")),
    "units=True": (lambda: plan(units=True), T, ("units=True", "path patterns", "number of elements")),
    "units=0": (lambda: plan(units=0), V, ("units=0", "at least 1")),
    "units=[1]": (lambda: plan(units=[1]), T, ("units=[1]", "path patterns")),
    "units=class": (lambda: plan(units=nn.Linear), T, ("units=the class Linear", "path patterns", "predicate")),
    "whole=True": (lambda: plan(whole=True), T, ("whole=True", "path patterns", "predicate")),
    "frozen=dict": (lambda: plan(frozen={"w": True}), T, ("frozen=an object of type dict", "path patterns")),
    "offload=1": (lambda: plan(fshard.AbstractMesh(shard=2), offload=1), T, ("offload=1", "path patterns")),
    "regather='no'": (lambda: plan(regather="no"), V, ("regather='no'", "no axis 'no'")),
    "regather=dict": (lambda: plan(regather={"a": 1}), T, ("regather['a']=1", "True, False, or names")),
    "together=1": (lambda: plan(together=1), T, ("together=1", "True or False")),
    "block=1.5": (lambda: plan(block=1.5), T, ("block=1.5", "a number of elements, at least 1")),
    "block=0": (lambda: plan(block=0), V, ("block=0", "at least 1")),
    "slices=6": (lambda: fshard.reduction.TreeSums(slices=6), V, ("slices=6", "a power of two")),
    "slices=True": (lambda: fshard.reduction.TreeSums(slices=True), T, ("slices=True", "a power of two")),
    "params_over=typo": (
        lambda: plan(params_over="shart"),
        V,
        ("params_over='shart'", "'shart'", "'shard', 'replicate'"),
    ),
    "state_over=typo": (lambda: plan(state_over=("shard", "x")), V, ("state_over=", "'x'", "'shard', 'replicate'")),
    "grads_over=True": (lambda: plan(grads_over=True), T, ("grads_over=True", "the name of an axis", "or ()")),
    "strategy=fsdp": (lambda: plan(strategy="fsdp"), V, ("strategy='fsdp'", "one of 'ddp', 'zero1'")),
    "params_over=0": (lambda: plan(params_over=0), T, ("params_over=0", "the name of an axis")),
    "policy=16": (lambda: plan(policy=16), T, ("policy", "a Policy, words", "got 16")),
    "policy=word": (lambda: plan(policy="bf16"), V, ("policy: 'bf16'", "expected one of storage", "compute=bf16")),
    "policy=unknown": (lambda: plan(policy="compute=bf17"), V, ("policy: compute='bf17'", "not a floating dtype")),
    "policy=maybe": (lambda: plan(policy="cast_inputs=maybe"), V, ("cast_inputs='maybe'", "'yes'", "'no'")),
    "Policy(cast_inputs)": (lambda: fshard.Policy(cast_inputs="no"), T, ("cast_inputs='no'", "True or False")),
    "Policy(int)": (
        lambda: fshard.Policy(compute=torch.int8),
        V,
        ("policy: compute=torch.int8", "not a floating dtype"),
    ),
    "Policy(overrides)": (lambda: fshard.Policy(overrides=5), T, ("overrides=5", "pairs of a pattern")),
    "Policy.cast": (lambda: fshard.Policy().cast(params(), "bf16"), V, ("policy.cast: to='bf16'", "'storage'")),
    "param_wire=5": (lambda: plan(param_wire=5), T, ("param_wire=5", "a wire", "Int8()", "encode, decode")),
    "grad_wire=class": (lambda: plan(grad_wire=wire.Int8), T, ("grad_wire=the class Int8", "a wire")),
    # --- shard_params, gather_params
    "shard_params(plan, params)": (lambda: fshard.shard_params(PLAN, params()), T, ("plan=", "dict", "(params, plan)")),
    "shard_params(sharded)": (lambda: fshard.shard_params(SHARDED, PLAN), T, ("params=", "Sharded", "gather_params")),
    "shard_params(src=1)": (lambda: fshard.shard_params(params(), PLAN, src=1), V, ("src=1", "a rank", "from 0 to 0")),
    "shard_params(src=-1)": (lambda: fshard.shard_params(params(), PLAN, src=-1), V, ("src=-1", "a rank")),
    "shard_params(src=True)": (lambda: fshard.shard_params(params(), PLAN, src=True), T, ("src=True", "a rank")),
    "shard_params(module)": (lambda: fshard.shard_params(MODULE, PLAN), V, ("the tree is not the plan's", "'w'")),
    "gather_params(plan)": (
        lambda: fshard.gather_params(PLAN),
        T,
        ("x=", "Plan", "expected a Sharded", "shard_params("),
    ),
    # --- losses
    "value_and_grad(module)": (lambda: fshard.value_and_grad(MODULE), T, ("loss_fn=", "Linear", "functional_call")),
    "value_and_grad(class)": (lambda: fshard.value_and_grad(nn.Linear), T, ("loss_fn=the class Linear", "a function")),
    "value_and_grad(3)": (lambda: fshard.value_and_grad(3), T, ("loss_fn=3", "a function")),
    "value_and_grad(has_aux)": (lambda: fshard.value_and_grad(loss, has_aux="yes"), T, ("has_aux='yes'", "True or")),
    "value_and_grad(reduce)": (lambda: fshard.value_and_grad(loss, reduce=None), T, ("reduce=None", "True or False")),
    "value(module)": (lambda: fshard.evaluate(MODULE), T, ("loss_fn=", "Linear", "functional_call")),
    "value(plain)": (
        lambda: fshard.evaluate(loss)(params(), X),
        T,
        ("params: expected a Sharded, got dict", "shard_params("),
    ),
    "grad of a module": (
        lambda: fshard.value_and_grad(loss)(MODULE, X),
        T,
        ("params: expected a Sharded, got Linear", "shard_params("),
    ),
    "Mean(count='3')": (
        lambda: fshard.evaluate(lambda p: fshard.Mean(p["w"].sum(), "3"))(SHARDED),
        V,
        ("the count of a Mean", "a number or a 0-d tensor", "got '3'"),
    ),
    "Mean(count=[3])": (
        lambda: fshard.evaluate(lambda p: fshard.Mean(p["w"].sum(), torch.ones(3)))(SHARDED),
        V,
        ("the count of a Mean", "0-d", "shape (3,)"),
    ),
    "Mean ** 0.5": (
        lambda: fshard.evaluate(lambda p: fshard.Mean(p["w"].sum(), 3) ** 0.5)(SHARDED),
        T,
        ("a Mean", "all_reduce total and count", "recipes.md, Statistics of all ranks' rows"),
    ),
    "Terms / Mean": (lambda: (MEAN + MEAN) / MEAN, T, ("a Mean", "all_reduce total and count")),
    "Mean of a Mean": (
        lambda: fshard.evaluate(lambda p: fshard.Mean(fshard.Mean(p["w"].sum(), 3), 1))(SHARDED),
        V,
        ("the loss function", "got a Mean", "all_reduce total and count", "recipes.md"),
    ),
    "Mean('3')": (
        lambda: fshard.evaluate(lambda p: fshard.Mean("3", 3))(SHARDED),
        V,
        ("the loss function: expected a 0-d floating tensor", "'3'"),
    ),
    "reduce_grads(plain)": (lambda: fshard.reduce_grads(params()), T, ("expected Unreduced gradients", "got dict")),
    "reduction=class": (lambda: fshard.value_and_grad(loss, reduction=type), V, ("reduction=", "expected 'exact'")),
    "inference_mode": (
        lambda: inferring(lambda: fshard.value_and_grad(loss)(SHARDED, X)),
        T,
        ("torch.inference_mode is on", "fshard.evaluate"),
    ),
    "step in inference_mode": (
        lambda: inferring(lambda: STEP(STATE, X)),
        T,
        ("torch.inference_mode is on", "Leave the"),
    ),
    # --- init_state, train_step
    "init_state(tx, params)": (
        lambda: fshard.init_state(TX, params()),
        T,
        ("params: expected a Sharded, got Transform",),
    ),
    "init_state(tx=class)": (
        lambda: fshard.init_state(SHARDED, torch.optim.SGD),
        T,
        ("tx: expected an optimizer", "got the class SGD", "from_torch("),
    ),
    "loss_scale=1024.0": (
        lambda: fshard.init_state(SHARDED, TX, loss_scale=1024.0),
        T,
        ("loss_scale=1024.0", "a scaler", "DynamicLossScale()"),
    ),
    "loss_scale=GradScaler": (
        lambda: fshard.init_state(SHARDED, TX, loss_scale=torch.amp.GradScaler("cpu")),
        T,
        ("loss_scale=an object of type GradScaler", "a scaler", "DynamicLossScale()"),
    ),
    "loss_scale=class": (
        lambda: fshard.init_state(SHARDED, TX, loss_scale=fshard.DynamicLossScale),
        T,
        ("loss_scale=the class DynamicLossScale", "a scaler"),
    ),
    "seed=1.5": (lambda: fshard.init_state(SHARDED, TX, seed=1.5), T, ("seed=1.5", "a whole number")),
    "train_step(tx, loss)": (lambda: fshard.train_step(TX, loss), T, ("loss_fn=", "Transform", "a function")),
    "train_step(module)": (lambda: fshard.train_step(MODULE, TX), T, ("loss_fn=", "Linear", "functional_call")),
    "tx=torch optimizer": (
        lambda: fshard.train_step(loss, torch.optim.SGD(MODULE.parameters())),
        T,
        ("tx: expected an optimizer", "of type SGD", "from_torch(torch.optim.X"),
    ),
    "accumulate=1.5": (lambda: fshard.train_step(loss, TX, accumulate=1.5), T, ("accumulate=1.5", "micro-batches")),
    "accumulate=True": (lambda: fshard.train_step(loss, TX, accumulate=True), T, ("accumulate=True", "micro-batches")),
    "accumulate=0": (lambda: fshard.train_step(loss, TX, accumulate=0), V, ("accumulate=0", "at least 1")),
    "clip_norm='1'": (lambda: fshard.train_step(loss, TX, clip_norm="1"), T, ("clip_norm='1'", "a number above 0")),
    "clip_norm=True": (lambda: fshard.train_step(loss, TX, clip_norm=True), T, ("clip_norm=True", "a number above 0")),
    "clip_norm=-1": (lambda: fshard.train_step(loss, TX, clip_norm=-1), V, ("clip_norm=-1", "a number above 0")),
    "clip_norm=0": (lambda: fshard.train_step(loss, TX, clip_norm=0), V, ("clip_norm=0", "a number above 0")),
    "clip_norm=nan": (lambda: fshard.train_step(loss, TX, clip_norm=torch.nan), V, ("clip_norm=nan", "above 0")),
    "reduction=False": (lambda: fshard.train_step(loss, TX, reduction=False), V, ("=False", "expected 'exact'")),
    "donate='yes'": (lambda: fshard.train_step(loss, TX, donate="yes"), T, ("donate='yes'", "True or False")),
    "reduce_once=2": (lambda: fshard.train_step(loss, TX, reduce_once=2), T, ("reduce_once=2", "True or False")),
    "has_aux=None": (lambda: fshard.train_step(loss, TX, has_aux=None), T, ("has_aux=None", "True or False")),
    "skip_labels=True": (lambda: fshard.train_step(loss, TX, skip_labels=True), T, ("skip_labels=True", "labels")),
    "step(batch, state)": (lambda: STEP(X, STATE), T, ("step(state, batch)", "expected a TrainState", "shape (1, 3)")),
    "step(params, batch)": (lambda: STEP(SHARDED, X), T, ("expected a TrainState", "Sharded")),
    "jit(step)(batch, state)": (
        lambda: fshard.jit(STEP, backend="eager")(X, STATE),
        T,
        ("step(state, batch)", "expected a TrainState"),
    ),
    "another optimizer's state": (
        lambda: fshard.train_step(loss, optim.adam(0.1))(STATE, X),
        V,
        ("optim.adam", "AdamState", "got SgdState", "another optimizer"),
    ),
    # --- optimizers
    "lr='1e-3'": (lambda: optim.sgd("1e-3"), T, ("optim.sgd: lr='1e-3'", "a number", "a schedule")),
    "lr=None": (lambda: optim.adamw(None), T, ("optim.adamw: lr=None", "a number")),
    "lr=True": (lambda: optim.adam(True), T, ("optim.adam: lr=True", "a number")),
    "lr=-1": (lambda: optim.lion(-1), V, ("optim.lion: lr=-1", "at least 0")),
    "lr=nan": (lambda: optim.sgd(torch.nan), V, ("optim.sgd: lr=nan", "at least 0")),
    "lr=tensor": (lambda: optim.sgd(torch.ones(2)), T, ("optim.sgd: lr=a torch.float32 tensor", "0-d tensor")),
    "lr=class": (lambda: optim.sgd(torch.optim.lr_scheduler.StepLR), T, ("lr=the class StepLR", "a schedule")),
    "schedule of str": (lambda: scheduled(lambda n: "1e-3"), T, ("a schedule gave '1e-3'", "a number or a 0-d tensor")),
    "schedule of row": (lambda: scheduled(lambda n: n.repeat(2)), T, ("a schedule gave a torch.float64", "0-d tensor")),
    "b1=2": (lambda: optim.adam(0.1, b1=2), V, ("optim.adam: b1=2", "at least 0, below 1")),
    "b2=1": (lambda: optim.adamw(0.1, b2=1.0), V, ("optim.adamw: b2=1.0", "below 1")),
    "b2=schedule": (lambda: optim.adam(0.1, b2=lambda n: 0.9), T, ("optim.adam: b2=", "a number")),
    "eps=-1": (lambda: optim.adamw(0.1, eps=-1), V, ("optim.adamw: eps=-1", "at least 0")),
    "weight_decay=-1": (lambda: optim.sgd(0.1, weight_decay=-1), V, ("optim.sgd: weight_decay=-1", "at least 0")),
    "momentum=-1": (lambda: optim.rmsprop(0.1, momentum=-1), V, ("optim.rmsprop: momentum=-1", "at least 0")),
    "nesterov=1": (lambda: optim.sgd(0.1, 0.9, nesterov=1), T, ("nesterov=1", "True or False")),
    "lr_decay=-1": (lambda: optim.adagrad(lr_decay=-1), V, ("optim.adagrad: lr_decay=-1", "at least 0")),
    "lamb": (lambda: optim.lamb(0.1, b1=-1), V, ("optim.lamb: b1=-1", "at least 0")),
    "adafactor(eps)": (lambda: optim.adafactor(eps=1e-3), T, ("optim.adafactor: eps=0.001", "two numbers")),
    "adafactor(d)": (lambda: optim.adafactor(d=0.5), V, ("optim.adafactor: d=0.5", "at least 1")),
    "adafactor(decay)": (lambda: optim.adafactor(beta2_decay=1), V, ("optim.adafactor: beta2_decay=1",)),
    "muon(steps)": (lambda: optim.muon(steps=0), V, ("optim.muon: steps=0", "at least 1")),
    "muon(momentum)": (lambda: optim.muon(momentum="x"), T, ("optim.muon: momentum='x'", "a number")),
    "muon(coefficients)": (lambda: optim.muon(coefficients=(1, 2)), T, ("coefficients=(1, 2)", "three numbers")),
    "muon(dtype)": (lambda: optim.muon(dtype="bf16"), T, ("optim.muon: dtype='bf16'", "a floating dtype")),
    "muon(rest)": (lambda: optim.muon(rest=3), T, ("tx: expected an optimizer", "got 3")),
    "adamw_8bit(block)": (lambda: optim.adamw_8bit(0.1, block=0), V, ("optim.adamw_8bit: block=0", "at least 1")),
    "clip(-1)": (lambda: optim.clip(-1), V, ("optim.clip: max_magnitude=-1", "above 0")),
    "clip_by_global_norm(nan)": (lambda: optim.clip_by_global_norm(torch.nan), V, ("max_norm=nan", "above 0")),
    "clip_by_leaf_norm(p)": (lambda: optim.clip_by_leaf_norm(1.0, p="2"), T, ("p='2'", "above 0")),
    "scale('x')": (lambda: optim.scale("x"), T, ("optim.scale: factor='x'", "a number")),
    "scale_by_schedule(0.1)": (lambda: optim.scale_by_schedule(0.1), T, ("schedule=0.1", "a function")),
    "add_decayed_weights": (lambda: optim.add_decayed_weights(None), T, ("weight_decay=None", "a number")),
    "chain(loss)": (lambda: optim.chain(TX, loss), T, ("tx: expected an optimizer", "of type function")),
    "whole_leaves(3)": (lambda: optim.whole_leaves(3), T, ("tx: expected an optimizer", "got 3")),
    "with_hyperparams(tx)": (lambda: optim.with_hyperparams(TX, lr=0.1), T, ("make: expected a function", "Transform")),
    "by_label(list)": (lambda: optim.by_label([TX], {}), T, ("by_label: transforms=", "a dict of an optimizer")),
    "by_label(labels)": (lambda: optim.by_label({"a": TX}, "a"), T, ("labels='a'", "a function", "a tree of labels")),
    "by_label(tx)": (lambda: optim.by_label({"a": 3}, {"**": "a"}), T, ("tx: expected an optimizer", "got 3")),
    "masked(mask)": (lambda: optim.masked(TX, True), T, ("labels=True", "a function", "a tree of labels")),
    "from_torch(instance)": (
        lambda: optim.from_torch(torch.optim.SGD(MODULE.parameters())),
        V,
        ("from_torch: cannot run 'SGD'", "give its class", "from_torch(SGD, lr=...)"),
    ),
    "from_torch(module)": (
        lambda: optim.from_torch(nn.Linear),
        V,
        ("cannot run 'Linear'", "no optimizer of torch.optim's"),
    ),
    "from_torch(lr='x')": (lambda: optim.from_torch(torch.optim.SGD, lr="x"), T, ("torch.optim.SGD refuses",)),
    "from_torch(typo)": (lambda: optim.from_torch(torch.optim.SGD, rate=1), T, ("torch.optim.SGD refuses", "'rate'")),
    "from_torch(b)": (lambda: optim.from_torch(torch.optim.Muon, lr=-1), V, ("torch.optim.Muon refuses", "-1")),
    # --- schedules
    "linear(steps)": (lambda: optim.schedules.linear(0.0, 1.0, 0), V, ("schedule linear: steps=0", "at least 1")),
    "linear(start)": (
        lambda: optim.schedules.linear("0", 1.0, 4),
        T,
        ("schedule linear: start='0'", "a finite number"),
    ),
    "cosine(steps)": (lambda: optim.schedules.cosine(1.0, 2.5), T, ("schedule cosine: steps=2.5", "a number of steps")),
    "constant(None)": (lambda: optim.schedules.constant(None), T, ("schedule constant: value=None", "a finite number")),
    "warmup_cosine": (lambda: optim.schedules.warmup_cosine(1.0, 5, 5), V, ("warmup_cosine: steps=5", "at least 6")),
    "join(number)": (
        lambda: optim.schedules.join([0.1, 0.2], [3]),
        T,
        ("join: schedules=[0.1, 0.2]", "functions of a count"),
    ),
    "join(boundaries)": (
        lambda: optim.schedules.join([optim.schedules.constant(1.0)] * 2, 3),
        T,
        ("join: boundaries=3", "a list of numbers"),
    ),
    # --- optimizer state
    "gather_state(rank)": (
        lambda: optim.state.gather_state(STATE.opt_state, -1),
        V,
        ("gather_state: rank=-1", "a rank"),
    ),
    "gather_state(True)": (
        lambda: optim.state.gather_state(STATE.opt_state, True),
        T,
        ("gather_state: rank=True", "a rank"),
    ),
    "shard_state(src)": (
        lambda: optim.state.shard_state({}, STATE.opt_state, "0"),
        T,
        ("shard_state: src='0'", "a rank"),
    ),
    "state_dict(key)": (
        lambda: optim.state.state_dict(STATE.opt_state, SHARDED, key="name"),
        V,
        ("state_dict: key='name'", "'path' or 'index'"),
    ),
    "load_state_dict(state, saved)": (
        lambda: optim.state.load_state_dict(STATE.opt_state, {"state": {}}, SHARDED),
        T,
        ("load_state_dict: saved=", "a dict in the format of torch.optim", "(saved, like, params)"),
    ),
    "load_state_dict({})": (
        lambda: optim.state.load_state_dict({}, STATE.opt_state, SHARDED),
        V,
        ("load_state_dict: saved", "a dict with 'state'", "there is nothing"),
    ),
    "apply_updates(structure)": (
        lambda: optim.apply_updates(params(), {"w": X}),
        V,
        ("apply_updates: updates are not of the structure of params", "lacks ['b']"),
    ),
    "apply_updates(tensor)": (lambda: optim.apply_updates(params(), X), V, ("expected a dict, got a Tensor",)),
    "apply_updates(sharded, plain)": (
        lambda: optim.apply_updates(SHARDED, params()),
        V,
        ("apply_updates: ", "expected a Sharded, got a dict"),
    ),
    "apply_updates(shape)": (
        lambda: optim.apply_updates(params(), {**params(), "b": torch.ones(1)}),
        V,
        ("the update of leaf 'b' has shape [1], the parameter [3]",),
    ),
    "apply_updates(complex)": (
        lambda: optim.apply_updates(params(), {**params(), "b": 1j * torch.ones(3)}),
        V,
        ("the update of leaf 'b' is complex", ".real"),
    ),
    "apply_updates(number)": (
        lambda: optim.apply_updates(params(), {**params(), "b": 1.0}),
        V,
        ("the update of leaf 'b' is no tensor: got 1.0",),
    ),
    "update(complex gradients)": (
        lambda: TX.update({**params(), "b": 1j * torch.ones(3)}, TX.init(params()), params()),
        V,
        ("optim.sgd: the gradient of leaf 'b' is complex, the parameter real",),
    ),
    "update(plain, sharded)": (
        lambda: TX.update(params(), TX.init(SHARDED), SHARDED),
        V,
        ("optim.sgd: gradients are not of the structure of parameters: expected a Sharded, got a dict",),
    ),
    "gather_state(str)": (lambda: optim.state.gather_state("abc"), T, ("gather_state: state='abc'", "tensors alone")),
    "state_dict(params, state)": (
        lambda: optim.state.state_dict(SHARDED, STATE.opt_state),
        V,
        ("a leaf 'w' which params have not", "(state, params)"),
    ),
    "state_dict(groups)": (
        lambda: optim.state.state_dict(STATE.opt_state, SHARDED, groups=3),
        T,
        ("state_dict: groups=3", "a list of dicts"),
    ),
    "lbfgs(lr)": (lambda: optim.lbfgs(-1.0), V, ("optim.lbfgs: lr=-1.0", "at least 0")),
    "lbfgs(history_size)": (lambda: optim.lbfgs(history_size="9"), T, ("optim.lbfgs: history_size='9'", "pairs")),
    "lbfgs(max_iter)": (lambda: optim.lbfgs(max_iter=1.5), T, ("optim.lbfgs: max_iter=1.5", "iterations")),
    "lbfgs(grad_fn)": (
        lambda: optim.lbfgs().update(params(), optim.lbfgs().init(params()), params(), grad_fn=3),
        T,
        ("optim.lbfgs: grad_fn=3", "grad_fn(params) -> grads, a function"),
    ),
    "reduce_once=typo": (
        lambda: fshard.train_step(loss, TX, reduce_once="typo")(STATE, X),
        V,
        ("reduce_once='typo'", "no axis 'typo'", "'shard', 'replicate'"),
    ),
    "clip_norm=tensor(-1)": (
        lambda: fshard.train_step(loss, TX, clip_norm=torch.tensor(-1.0)),
        V,
        ("clip_norm=-1.0", "a number above 0"),
    ),
    "lazy": (lambda: leaf(nn.UninitializedParameter()), V, ("leaf 'b.0'", "a lazy one", "Run its module")),
    "Policy.parse(None)": (lambda: fshard.Policy.parse(None), T, ("Policy.parse: text=None", "words")),
    "eval_shape(3)": (lambda: fshard.eval_shape(3), T, ("eval_shape: fn=3", "a function")),
    "nonfinite_leaves(str)": (lambda: fshard.tree.nonfinite_leaves({"a": "x"}), T, ("leaf 'a'", "a tensor", "got 'x'")),
    "oracle(3)": (lambda: testing.oracle(3, TX), T, ("loss_fn=3", "a function")),
    "oracle(one batch)": (
        lambda: testing.oracle(loss, TX).step(testing.oracle(loss, TX).init(params()), X),
        T,
        ("oracle: batches=a torch.float32 tensor", "a list of the batches of all ranks"),
    ),
    "oracle([])": (
        lambda: testing.oracle(loss, TX).step(testing.oracle(loss, TX).init(params()), []),
        T,
        ("oracle: batches=[]", "one for each"),
    ),
    "whole_state(params)": (lambda: testing.whole_state(params()), T, ("whole_state: state=", "a TrainState")),
    "record(3)": (lambda: testing.record(3, "x"), T, ("record: step=3", "a function")),
    "record(dir)": (lambda: testing.record(STEP, 3), T, ("record: dir=3", "a folder")),
    "record(steps)": (lambda: testing.record(STEP, "x", steps="1"), T, ("record: steps='1'", "numbers of steps")),
    # --- zero
    "zero(mesh=4)": (lambda: fshard.zero(TX, 4), T, ("mesh: expected a DeviceMesh", "got 4")),
    "zero(partition)": (lambda: fshard.zero(TX, partition="leafs"), V, ("zero: partition='leafs'", "'flat' or 'leaf'")),
    "zero(grads)": (lambda: fshard.zero(TX, grads=None), V, ("zero: grads=None", "'reduced' or 'local'")),
    "zero(over)": (lambda: fshard.zero(TX, over="data"), V, ("zero: over='data'", "no axis 'data'", "'shard'")),
    "zero(over=1)": (lambda: fshard.zero(TX, over=1), T, ("zero: over=1", "the name of an axis")),
    "zero(bucket)": (lambda: fshard.zero(TX, bucket=0), V, ("zero: bucket=0", "at least 1")),
    "zero(block)": (lambda: fshard.zero(TX, block="1"), T, ("zero: block='1'", "a number of elements")),
    "zero(mesh, tx)": (lambda: fshard.zero(None, TX), T, ("tx: expected an optimizer", "got None")),
    "zero.init(sharded)": (lambda: fshard.zero(TX).init(SHARDED), T, ("zero: expected whole parameters", "use tx")),
    "zero.init(module)": (lambda: fshard.zero(TX).init(MODULE), V, ("leaf ''", "got Linear", "functionalize")),
    # --- loss scales
    "DynamicLossScale('8')": (lambda: fshard.DynamicLossScale("8"), T, ("a loss scale='8'", "a number above 0")),
    "DynamicLossScale(-1)": (
        lambda: fshard.DynamicLossScale(-1.0),
        V,
        ("a loss scale is a finite number above 0", "-1"),
    ),
    "growth_factor='2'": (lambda: fshard.DynamicLossScale(growth_factor="2"), T, ("growth_factor='2'", "a number")),
    "growth_interval=1.5": (
        lambda: fshard.DynamicLossScale(growth_interval=1.5),
        T,
        ("growth_interval=1.5", "updates"),
    ),
    "StaticLossScale(None)": (lambda: fshard.StaticLossScale(None), T, ("a loss scale=None", "a number above 0")),
    "scale below min_scale": (
        lambda: fshard.DynamicLossScale(2.0, min_scale=4.0),
        V,
        ("a loss scale=2.0", "min_scale=4.0 <= scale <= max_scale=inf"),
    ),
    "new_scale above max_scale": (
        lambda: fshard.DynamicLossScale(2.0, max_scale=4.0).adjust(torch.zeros(()), 8.0),
        V,
        ("a loss scale=8.0", "max_scale=4.0"),
    ),
    "adjust(1.0)": (lambda: SCALER.adjust(1.0), T, ("found_inf=1.0", "a 0-d tensor")),
    "adjust(True)": (lambda: SCALER.adjust(True), T, ("found_inf=True", "a 0-d tensor")),
    "adjust({})": (lambda: SCALER.adjust({}), T, ("found_inf=an object of type dict", "one for each label")),
    "adjust(unscale)": (
        lambda: SCALER.adjust(SCALER.unscale(params())),
        T,
        ("found_inf=", "a 0-d tensor", "unscale gives (grads, found_inf)"),
    ),
    "adjust(vector)": (
        lambda: SCALER.adjust(X[0]),
        V,
        ("found_inf=a torch.float32 tensor of shape (3,)", "a 0-d tensor"),
    ),
    "adjust(labels of vectors)": (lambda: SCALER.adjust({"a": X}), V, ("found_inf=", "shape (1, 3)", "a 0-d tensor")),
    "StaticLossScale.adjust": (lambda: fshard.StaticLossScale(2.0).adjust(X), V, ("found_inf=", "a 0-d tensor")),
    "NoLossScale.adjust": (lambda: fshard.NoLossScale().adjust(1.0), T, ("found_inf=1.0", "a 0-d tensor")),
    "step(found_inf=True)": (
        lambda: TX.step(params(), TX.init(params()), params(), found_inf=True),
        T,
        ("found_inf=True", "a 0-d tensor"),
    ),
    "select(True)": (lambda: fshard.select(True, X, X), T, ("found_inf=True", "a 0-d tensor. unscale gives")),
    "select(trees first)": (
        lambda: fshard.select(params(), params(), FOUND),
        T,
        ("found_inf=an object of type dict", "a 0-d tensor"),
    ),
    "select(vector)": (lambda: fshard.select(X[0], X, X), V, ("found_inf=", "shape (3,)", "a 0-d tensor")),
    "select(shapes)": (
        lambda: fshard.select(FOUND, {"a": X}, {"a": torch.ones(3, 3)}),
        V,
        ("select: leaf 'a'", "one shape and dtype", "shape (1, 3)", "shape (3, 3)"),
    ),
    "select(dtypes)": (
        lambda: fshard.select(FOUND, {"a": [X]}, {"a": [X.double()]}),
        V,
        ("select: leaf 'a.0'", "one shape and dtype", "torch.float32", "torch.float64"),
    ),
    "select(number)": (lambda: fshard.select(FOUND, {"a": X}, {"a": 3.0}), V, ("select: leaf 'a'", "got", "3.0")),
    "select(structures)": (lambda: fshard.select(FOUND, params(), {"w": X}), V, ("structure", "['b']")),
    "unscale(mesh='shard')": (
        lambda: SCALER.unscale(params(), mesh="shard"),
        T,
        ("mesh: expected a DeviceMesh", "'shard'"),
    ),
    "nonfinite_leaves(mesh)": (
        lambda: fshard.tree.nonfinite_leaves(params(), "x"),
        T,
        ("mesh: expected a DeviceMesh", "'x'"),
    ),
    # --- jit, check, meshes, data
    "jit(3)": (lambda: fshard.jit(3), T, ("jit: fn=3", "a function of trees")),
    "jit(donate)": (lambda: fshard.jit(STEP, donate=1), T, ("jit: donate=1", "True or False")),
    "jit(bucket)": (lambda: fshard.jit(STEP, bucket=-1), V, ("jit: bucket=-1", "a number of bytes")),
    "jit(in_flight)": (lambda: fshard.jit(STEP, in_flight=1.5), T, ("jit: in_flight=1.5", "a number of bytes")),
    "jit(backend)": (lambda: fshard.jit(STEP, backend=3), T, ("jit: backend=3", "the name of a backend")),
    "check(3)": (lambda: fshard.check(3), T, ("check: fn=3", "a step")),
    "check(mesh)": (lambda: fshard.check(STEP, 4), T, ("mesh: expected a DeviceMesh", "got 4")),
    "check(no Sharded)": (
        lambda: fshard.check(lambda x: x)(X),
        T,
        ("check: expected a Sharded", "fshard.check(fn, mesh)"),
    ),
    "AbstractMesh()": (fshard.AbstractMesh, V, ("AbstractMesh: expected axes by name", "AbstractMesh(shard=64)")),
    "AbstractMesh(8)": (lambda: fshard.AbstractMesh(8), T, ("AbstractMesh: device=8", "Name axes: shard=64")),
    "AbstractMesh('2')": (lambda: fshard.AbstractMesh(shard="2"), T, ("AbstractMesh: shard='2'", "a number of ranks")),
    "AbstractMesh(rank)": (lambda: fshard.AbstractMesh(rank=2, shard=2), V, ("AbstractMesh: rank=2", "from 0 to 1")),
    "join_batches(3)": (lambda: list(fshard.collectives.join_batches(3)), T, ("join_batches: data=3", "batches")),
    "join_batches(mesh)": (
        lambda: list(fshard.collectives.join_batches([X], 2)),
        T,
        ("mesh: expected a DeviceMesh", "got 2"),
    ),
    "global_norm(p='2')": (
        lambda: fshard.optim.global_norm(params(), "2"),
        T,
        ("global_norm: p='2'", "a number above 0"),
    ),
    "global_norm(p=-1)": (lambda: fshard.optim.global_norm(params(), -1), V, ("global_norm: p=-1", "a number above 0")),
    "global_norm(ints)": (
        lambda: fshard.optim.global_norm({"n": torch.arange(3)}),
        T,
        ("global_norm: leaf 'n'", "a floating tensor", "torch.int64"),
    ),
    "global_norm('x')": (
        lambda: fshard.optim.global_norm("x"),
        T,
        ("global_norm: leaf ''", "a floating tensor", "str"),
    ),
    "global_norm(None)": (lambda: fshard.optim.global_norm(None), T, ("global_norm: leaf ''", "got NoneType")),
    "global_norm(Unreduced)": (
        lambda: fshard.optim.global_norm(fshard.value_and_grad(loss, reduce=False)(SHARDED, X)[1]),
        T,
        ("global_norm: these gradients are each rank's own", "fshard.reduce_grads"),
    ),
    # --- wires
    "Int8(0)": (lambda: wire.Int8(0), V, ("Int8: block=0", "at least 1")),
    "Int8('8')": (lambda: wire.Int8("8"), T, ("Int8: block='8'", "a number of elements")),
    "Cast('bf16')": (lambda: wire.Cast("bf16"), T, ("Cast: dtype='bf16'", "a floating dtype")),
    "Float8(f16)": (lambda: wire.Float8(torch.float16), T, ("Float8: dtype=torch.float16", "8 bits")),
    # --- testing
    "simulate(shard=0)": (lambda: testing.simulate(loss, shard=0), V, ("shard=0", "a number of ranks", "at least 1")),
    "simulate(shard='2')": (lambda: testing.simulate(loss, shard="2"), T, ("shard='2'", "a number of ranks")),
    "simulate(True)": (lambda: testing.simulate(loss, shard=True), T, ("shard=True", "a number of ranks")),
    "simulate(3)": (lambda: testing.simulate(3), T, ("fn=3", "fn(mesh, *args), a function")),
    "World(threads=0)": (lambda: testing.World(2, threads=0), V, ("threads=0", "a number of threads", "at least 1")),
    "oracle(threads=True)": (lambda: testing.oracle(loss, TX, threads=True), T, ("threads=True", "number of threads")),
    "World(axes=2)": (lambda: testing.World(axes=2), T, ("axes=2", "a dict of the number of ranks by axis")),
    "World(faults)": (lambda: testing.World(2, faults=[3]), T, ("faults=3", "Dies, Garbage or Slow")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call(name: str) -> None:
    """Each wrong call is an error that says what came and what was expected: otherwise a user would meet an error
    from deep inside torch."""
    call, kind, words = WRONG[name]
    says(call, kind, *words)


def on_ranks(mesh: Any) -> None:
    """Check wrong calls that need a mesh, on two ranks."""
    x, sharded = torch.ones(2), fshard.shard_params(params(), plan(mesh))
    tx = optim.adam(0.1)
    state = fshard.init_state(sharded, tx)
    for what, call, words in [
        ("all_gather(mesh, x)", lambda: fshard.all_gather(mesh, x, "shard"), ["mesh: expected a DeviceMesh", "tensor"]),
        ("axis", lambda: fshard.all_reduce(x, mesh, "model"), ["no axis 'model'", "'shard'"]),
        ("axis=0", lambda: fshard.all_reduce(x, mesh, 0), ["no axis 0", "'shard'"]),
        *(
            (call.__name__, partial(call, x, mesh, axes), [f"no axis {axes!r}", each])
            for call in (fshard.all_gather, fshard.all_reduce, fshard.reduce_scatter)
            for axes in (("replicate", "shard"), ["replicate", "shard"])
            for each in ["once for each axis: all_gather for the last first, reduce_scatter for the first"]
        ),
        ("op", lambda: fshard.all_reduce(x, mesh, "shard", op="prod"), ["op='sum', 'max', 'min'", "not 'prod'"]),
        *(
            (name, partial(fshard.all_reduce, {"a": x.to(dtype)}, mesh, "shard", op=name), [*words, str(dtype)])
            for name in ("max", "min")
            for dtype in (torch.complex64, torch.float8_e4m3fn, torch.uint16)
            for words in [["all_reduce: leaf 'a'", f"no {name} of"]]
        ),
        (
            "sum",
            lambda: fshard.reduce_scatter(x.to(torch.uint16), mesh, "shard"),
            ["leaf ''", "no sum of torch.uint16"],
        ),
        (
            "found",
            lambda: consensus.any_rank(torch.ones((), dtype=torch.complex64), mesh),
            ["no max of torch.complex64"],
        ),
        ("src", lambda: fshard.broadcast(x, mesh, "shard", src=2), ["src=2", "one of the 2 ranks"]),
        ("src", lambda: fshard.broadcast(x, mesh, "shard", src=True), ["src=True", "a rank"]),
        (
            "leaf",
            lambda: fshard.collectives.vary({"a": 3}, mesh, "shard"),
            ["leaf 'a'", "expected a tensor", "got int"],
        ),
        ("sparse", lambda: fshard.all_gather(x.to_sparse(), mesh, "shard"), ["leaf ''", "dense", ".to_dense()"]),
        ("label", lambda: fshard.all_to_all(x, mesh, "shard", label=3), ["label=3", "a word"]),
        *(
            ("dim", partial(call, {"a": x}, mesh, "shard", **wrong), ["leaf 'a'", "a dim", "(2,)"])
            for call, wrong in [
                (fshard.all_gather, {"dim": 1}),
                (fshard.reduce_scatter, {"dim": -2}),
                (fshard.all_to_all, {"split": 1}),
                (fshard.all_to_all, {"join": 1}),
            ]
        ),
        ("dim", lambda: fshard.all_gather(x, mesh, "shard", dim=0.0), ["all_gather: dim=0.0", "number of a dim"]),
        ("by", lambda: fshard.shift(x, mesh, "shard", 1.0), ["shift: by=1.0", "a number of ranks"]),
        ("wrap", lambda: fshard.shift(x, mesh, "shard", wrap=1), ["shift: wrap=1", "True or False"]),
        *(
            ("sizes", partial(fshard.all_to_all, {"a": torch.ones(2, 2)}, mesh, "shard", sizes=sizes, **more), words)
            for sizes, more, words in [
                (2, {}, ["sizes=2", "two lists of lengths"]),
                (([1, 1], 2), {}, ["sizes=([1, 1], 2)", "two lists of lengths"]),
                (([1, 1],), {}, ["sizes=([1, 1],)", "two lists of lengths"]),
                (([2], [2]), {}, ["sizes=((2,), (2,))", "2 lengths each"]),
                (([0, 2], [1, 1]), {}, ["sizes=((0, 2), (1, 1))", "alike for rank"]),
                (([3, -1], [3, -1]), {}, ["sizes=-1", "the length of a part", "at least 0"]),
                (([1.0, 1], [1, 1]), {}, ["sizes=1.0", "the length of a part"]),
                (([1, 2], [1, 2]), {}, ["leaf 'a'", "sizes[0]=(1, 2)", "dim 0", "(2, 2)"]),
                (([1, 1], [1, 1]), {"join": 1}, ["leaf 'a'", "split and join alike", "(0, 1)"]),
            ]
        ),
        ("rows", lambda: fshard.reduce_scatter(torch.ones(3), mesh, "shard"), ["dim 0", "(3,)", "2 ranks"]),
        ("src=5", lambda: fshard.shard_params(params(), sharded.plan, src=5), ["src=5", "a rank", "from 0 to 1"]),
        ("src=-1", lambda: fshard.shard_params(params(), sharded.plan, src=-1), ["src=-1", "from 0 to 1"]),
        ("rank=9", lambda: fshard.state_dict(sharded, rank=9), ["rank=9", "from 0 to 1"]),
        ("rank=9", lambda: optim.state.gather_state(state.opt_state, rank=9), ["rank=9", "from 0 to 1"]),
        ("rank=9", lambda: optim.state.state_dict(state.opt_state, sharded, rank=9), ["rank=9", "from 0 to 1"]),
        ("src=2", lambda: optim.state.shard_state({}, state.opt_state, src=2), ["src=2", "from 0 to 1"]),
        *(
            (kind, partial(call, {"a": sharded}, mesh, "shard"), [f"{kind}: leaf 'a'", "a Sharded", "gather_params"])
            for kind, call in {
                "all_gather": fshard.all_gather,
                "reduce_scatter": fshard.reduce_scatter,
                "all_to_all": fshard.all_to_all,
                "all_reduce": fshard.all_reduce,
                "broadcast": fshard.broadcast,
            }.items()
        ),
        (
            "chain",
            lambda: optim.chain(optim.clip(1.0), fshard.zero(tx, mesh, grads="local")),
            ["optim.chain: zero(grads='local')", "zero(chain(...), mesh, grads='local')"],
        ),
        ("zero", lambda: fshard.zero(tx, mesh, over="data"), ["over='data'", "no axis 'data'", "'shard'"]),
        (
            "meta",
            lambda: fshard.shard_params({k: v.to("meta") for k, v in params().items()}, sharded.plan),
            ["leaf 'w'", "expected a tensor on cpu", "got one on meta", "src"],
        ),
        ("one device's", lambda: STEP(state, X), ["optim.sgd", "SgdState", "got AdamState"]),
        ("another plan", lambda: fshard.train_step(loss, tx)(_with(state, STATE), X), ["made for other parameters"]),
    ]:
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert all(word in str(caught.value) for word in words), (what, words, str(caught.value))
    assert fshard.all_reduce(x * (mesh.get_local_rank("shard") + 1), mesh, "shard").tolist() == [3.0, 3.0]


def _with(state: fshard.TrainState, other: fshard.TrainState) -> fshard.TrainState:
    """A state with the parameters of one plan and the optimizer state of another."""
    opt_state = optim.adam(0.1).init(other.params)
    return fshard.TrainState(state.params, opt_state, state.loss_scale, state.step, state.rng, state.extra)


@pytest.mark.parametrize("world", [simulated, gloo])
def test_wrong_calls_on_two_ranks(world: Any) -> None:
    """Wrong calls on a mesh are errors on every rank, also in processes: otherwise ranks would wait for each other."""
    world(on_ranks, shard=2)


def real_groups(mesh: Any) -> None:
    """Check wrong calls that only processes can make: a group in place of a mesh, a mesh of other ranks, DTensors."""
    says(lambda: plan(mesh.get_group("shard")), TypeError, "mesh: expected a DeviceMesh", "from_group(")
    other = DeviceMesh("cpu", [1 - mesh.get_rank()], mesh_dim_names=("shard",), _init_backend=False)
    says(lambda: plan(other), ValueError, "mesh: this rank is none of its ranks")
    held = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    says(lambda: leaf(held), ValueError, "leaf 'b.0'", "expected a plain tensor", "got a DTensor", ".full_tensor()")
    given = {"w": DTensor.from_local(torch.ones(3), mesh, [Replicate()]), "b": torch.zeros(3)}
    says(lambda: fshard.shard_params(given, plan(mesh)), ValueError, "leaf 'w'", "got a DTensor", ".full_tensor()")


def test_groups_and_dtensors() -> None:
    """A process group or a DTensor in the wrong place is an error with the remedy; without it a user would not know
    what to pass."""
    gloo(real_groups, shard=2)


def test_calls_that_are_right() -> None:
    """Parameters, classes with defaults, tensors as numbers and inference mode are accepted: otherwise correct code
    would be refused."""
    fshard.make_plan(dict(MODULE.named_parameters()), units=["weight"])
    optim.from_torch(torch.optim.SGD)
    optim.clip_by_global_norm(torch.inf)
    fshard.train_step(loss, TX, clip_norm=torch.tensor(1.0))
    assert (
        fshard.make_plan(
            params(),
            params_over=("replicate", "shard"),
            grads_over=("replicate", "shard"),
            state_over=("replicate", "shard"),
        ).params_over
        == ()
    )
    with torch.inference_mode():
        value = fshard.evaluate(loss)(fshard.shard_params(params(), PLAN), X)
    assert value == 3


def test_what_is_made_in_inference_mode_trains_outside() -> None:
    """Parameters made in inference mode can be trained outside: otherwise such a model could be loaded, but not
    trained."""
    with torch.inference_mode():
        whole = params()
        sharded = fshard.shard_params(whole, fshard.make_plan(whole))
        state = fshard.init_state(sharded, TX)
    for start in (state, fshard.init_state(fshard.shard_params(whole, PLAN), TX)):
        after, _ = STEP(start, X)
        assert fshard.gather_params(after.params)["w"].tolist() == pytest.approx([0.9] * 3)
