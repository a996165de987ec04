"""Hooks over one method end in any order, and each keeps what is its own."""

from autoprec.backends.keras.apply.method_hooks import Hook, remove_hook


class Counted:
    def add(self, value):
        return value

    add.mark = "its own"


class Plus(Hook):
    def __init__(self, original, more):
        super().__init__(original)
        self.more = more

    def __call__(self, value):
        return self.original(value) + self.more


def test_a_hook_above_one_that_ends_keeps_its_own_values():
    owner = Counted()
    hooks = []
    for more in (1, 10, 100):
        hooks.append(Plus(owner.add, more))
        owner.add = hooks[-1]
    assert owner.add(0) == 111
    remove_hook(owner, "add", hooks[1])
    assert owner.add(0) == 101
    assert owner.add.mark == "its own"
    remove_hook(owner, "add", hooks[0])
    assert owner.add(0) == 100
    remove_hook(owner, "add", hooks[2])
    assert "add" not in vars(owner)
