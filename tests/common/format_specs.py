"""Random format specs for property tests."""

from hypothesis import strategies as st

from crossgrain.recipe.format_spec import Delayed, FormatSpec, FourOverSix, StochasticRounding

ELEMENTS = st.sampled_from(["e4m3", "e5m2"])
EPSILONS = st.floats(0, 1e30)
DELAYED = st.builds(
    Delayed, st.integers(1, 4096), st.sampled_from(["max", "most_recent"]), st.integers(-4, 4), st.booleans()
)
ROUNDING = st.none() | st.builds(StochasticRounding, st.sampled_from(["hash", "philox"]))
FOUR_OVER_SIX = st.builds(FourOverSix, st.sampled_from(["mae", "mse"]), st.sampled_from([256, 448]))


def any_spec() -> st.SearchStrategy[FormatSpec]:
    """Any value that a spec can have, also with options that exclude each other for one operand."""
    flag = st.booleans()
    return st.one_of(
        st.builds(FormatSpec, st.just("hp"), dtype=st.sampled_from([None, "bf16", "fp16", "fp32"])),
        st.builds(FormatSpec, st.just("fp8"), element=ELEMENTS, pow2=flag, eps=EPSILONS, delayed=st.none() | DELAYED),
        st.builds(FormatSpec, st.just("fp8_block"), element=ELEMENTS, two_d=flag, f32_scales=flag, eps=EPSILONS),
        st.builds(FormatSpec, st.just("mxfp8"), element=ELEMENTS, two_d=flag),
        st.builds(
            FormatSpec,
            st.just("nvfp4"),
            two_d=flag,
            row_scaled=flag,
            rht=flag,
            sr=ROUNDING,
            four_over_six=st.none() | FOUR_OVER_SIX,
        ),
        st.builds(FormatSpec, st.sampled_from(["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2"]), sr=ROUNDING),
    )
