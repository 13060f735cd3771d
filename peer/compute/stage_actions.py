"""What each kind of action of a step does with the stages of one peer, and with what it takes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...dag.plan.action import Action, ExchangeContent, Kind
from ...dag.schedule.flow import Role, Transfer
from .build import BuiltStages, Inputs
from .exchange import Echo, Taken, present

__all__ = ["forget_moments", "run_action"]

Given = Mapping[Transfer, Tensor | None]
"""By transfer, the value that leaves; None: no gradient came to it."""

_OF_HOLDERS = (ExchangeContent.GRADIENT, ExchangeContent.DELTA)


def run_action(work: BuiltStages, step: int, action: Action, taken: Taken, echo: Echo) -> Given:
    """Do one action; return what leaves. `taken`: transfers with their values, of which nothing is
    changed. Raises DataError for a row that is asked for and not there."""
    match action.kind:
        case Kind.FORWARD:
            return _forward(work, step, action, taken)
        case Kind.BACKWARD:
            return _backward(work, step, action, taken)
        case Kind.WEIGHT:
            m = action.microbatch
            work.held[action.stage].backward_weight(work.place(step, m), m)
            return {}
        case Kind.EVALUATE:
            return _evaluate(work, action, taken)
        case Kind.UPDATE:
            _update(work, step)
            return {}
        case _:
            if action.kind is Kind.GIVE and action.content in _OF_HOLDERS:
                work.held[action.stage].strategy.on_gradient(step)
            norm = action.kind is Kind.GIVE and action.content is ExchangeContent.NORM
            if norm and not work.order.plan.without_norm:
                _bend(work, step)
            return work.exchange.run(action, taken, echo, step)


def _forward(work: BuiltStages, step: int, action: Action, taken: Taken) -> Given:
    held, m = work.held[action.stage], action.microbatch
    held.strategy.before_forward()
    ports = {t.value: present(t, v) for t, v in taken}
    inputs = work.inputs.pop((step, m, action.stage), None)
    if inputs is None and held.stage.inputs:
        inputs = work.data.train(*work.place(step, m), held.stage.inputs)
    forwarded = held.forward(work.place(step, m), m, ports, inputs or {})
    if held.stage.makes_loss:
        _report(work, True, m, ports, inputs or {}, forwarded.results)
    gives = work.flow.at(step).gives(work.order.peer, action)
    return {t: forwarded.ports[work.flow.made(t)] for t in gives}


def _backward(work: BuiltStages, step: int, action: Action, taken: Taken) -> Given:
    held, m = work.held[action.stage], action.microbatch
    grads: dict[str, list[Tensor | None]] = {}
    for transfer, tensor in taken:
        if transfer.role is Role.ACTIVATION_GRAD:
            grads.setdefault(transfer.value, []).append(tensor)
        else:  # a result made behind the loss
            work.exchange.report(True, m, {transfer.value: present(transfer, tensor)})
    seed = work.exchange.seed_of(step, m) if held.stage.makes_loss else 1.0
    back = held.backward(work.place(step, m), m, grads, seed)
    gives = work.flow.at(step).gives(work.order.peer, action)
    return {t: back.get(work.flow.made(t)) for t in gives}


def _evaluate(work: BuiltStages, action: Action, taken: Taken) -> Given:
    held, m = work.held[action.stage], action.microbatch
    ports = {t.value: present(t, v) for t, v in taken}
    inputs: Inputs = {}
    if held.stage.inputs:
        inputs = work.data.held_out(m, held.stage.inputs)
    with held.averaged():
        forwarded = held.executor.evaluate(ports, inputs)
    if held.stage.makes_loss:
        _report(work, False, m, ports, inputs, forwarded.results)
    gives = work.flow.gives(work.order.peer, action)
    return {t: forwarded.ports[t.value] for t in gives}


def _report(
    work: BuiltStages,
    training: bool,
    m: int,
    ports: Inputs,
    inputs: Inputs,
    results: Inputs,
) -> None:
    """Loss, weight and metrics, wherever the loss's stage has them from."""
    named = {f"in:{name}": tensor for name, tensor in inputs.items()}
    work.exchange.report(training, m, {**named, **ports, **results})


def _update(work: BuiltStages, step: int) -> None:
    if work.order.plan.without_norm:
        _bend(work, step)
    weight, norm = work.exchange.totals_of_update(step)
    for held in work.held.values():
        if not work.exchange.overflowed:
            held.strategy.update(step, weight=weight, norm=norm)
            if weight:
                held.strategy.holder.optimizer.average()
        if held.stage.updates:
            held.apply_statistics(step)
        held.executor.zero_grad()
        held.collected.clear()
    work.exchange.end_step()
    if work.rounds is not None and work.rounds.stepped(step):
        forget_moments(work)


def _bend(work: BuiltStages, step: int) -> None:
    if work.rounds is not None:
        work.rounds.bend(step)


def forget_moments(work: BuiltStages) -> None:
    """Have optimizers begin anew: what was trained so far is in no stage any more."""
    for held in work.held.values():
        held.strategy.holder.optimizer.reset(held.stage.trainable)
