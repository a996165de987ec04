"""The modules that an exception was raised in, read from its traceback."""

from __future__ import annotations

import pytest

from autoprec.backends.shared.raising_modules import modules_raised_in, note_modules


class Module:
    def __init__(self, *children, error=None):
        self.children, self.error = children, error

    def forward(self):
        for child in self.children:
            child.forward()
        if self.error is not None:
            raise self.error


def raised(module):
    try:
        module.forward()
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


def test_the_modules_are_those_whose_code_was_running_innermost_first():
    inner, idle = Module(error=RuntimeError("dtypes")), Module()
    outer = Module(idle, inner)
    error = raised(outer)
    note_modules(error, {id(outer): "", id(inner): "inner", id(idle): "idle"})
    assert modules_raised_in(error) == ("inner", "")


class Short(Module):
    def forward(s):
        raise s.error


def test_a_method_may_call_its_object_what_it_likes_and_a_function_of_it_is_none():
    inner, outer = Short(error=RuntimeError("dtypes")), Module()
    outer.children = (inner,)

    def step(model):
        model.forward()
        raise AssertionError("it did not raise")

    def loss_of(model):
        raise RuntimeError("dtypes")

    paths = {id(outer): "", id(inner): "inner"}
    for run, expected in ((step, ("inner", "")), (loss_of, ())):
        with pytest.raises(RuntimeError) as error:
            run(outer)
        note_modules(error.value, paths)
        assert modules_raised_in(error.value) == expected


def test_objects_that_are_no_modules_are_left_out():
    inner = Module(error=RuntimeError("dtypes"))
    error = raised(Module(Module(inner)))
    note_modules(error, {id(inner): "inner"})
    assert modules_raised_in(error) == ("inner",)


def test_an_exception_raised_in_place_of_the_first_one_tells_as_much():
    class Tracing(Module):
        def forward(self):
            try:
                super().forward()
            except RuntimeError:
                raise TypeError("in the traced function")  # noqa: B904

    inner = Module(error=RuntimeError("dtypes"))
    outer = Tracing(inner)
    error = raised(outer)
    assert isinstance(error, TypeError)
    note_modules(error, {id(outer): "outer", id(inner): "inner"})
    assert modules_raised_in(error) == ("inner", "outer")


def test_an_exception_without_a_note_tells_nothing():
    assert modules_raised_in(RuntimeError("elsewhere")) == ()


@pytest.mark.parametrize("cycle", [True, False])
def test_exceptions_that_hold_each_other_come_to_an_end(cycle):
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__ = second
    if cycle:
        second.__cause__ = first
    note_modules(first, {})
    assert modules_raised_in(first) == ()


def test_an_exception_that_takes_no_attribute_is_left_alone():
    class Sealed(Exception):
        def __setattr__(self, name, value):
            raise AttributeError(name)

    error = raised(Module(error=Sealed()))
    note_modules(error, {})
    assert modules_raised_in(error) == ()
