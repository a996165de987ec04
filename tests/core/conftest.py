"""How Hypothesis runs where thousands of mutants are to be killed: any failure will do."""

from hypothesis import Phase, settings

settings.register_profile(
    "mutants", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None
)
