"""The areas of the source that mutation runs sample, and the tests that should notice a change of each file.

A file's tests are those of every row whose pattern matches it, the last row first: rows of whole folders stand before those of their files.
Few and fast tests suffice: those that state what the file has to do, the fastest first. Tests that compare digests of the source
(`test_every_record_is_proven`, say) are not among them: they fail for every change, right or wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch

AREAS: Mapping[str, Sequence[str]] = {
    "compute": ["compute/**/*.py"],
    "schedules": ["schedules/**/*.py"],
    "records": ["src/im2win/records/*.py"],
    "numerics": ["src/im2win/numerics/*.py"],
    "reconstruct": ["reconstruct/**/*.py"],
}

_MODELS_OF_CUDA = [
    "tests/schedules/cuda/test_cuda_models.py", "tests/registry/test_floors.py", "tests/registry/test_features.py",
    "tests/schedules/cuda/test_cuda_tiles.py", "tests/registry/test_registry.py",
    "tests/records/test_committed.py::test_how_well_the_model_of_filters_in_steps_fits",
    "tests/records/test_committed.py::test_how_well_the_models_choose_among_recorded_tiles",
]  # fmt: skip
_SELECTS_ON_CPUS = ["tests/registry/test_registry.py", "tests/registry/test_floors.py", "tests/registry/test_features.py"]
_MULTISTAGE = [
    "tests/schedules/cuda/test_cuda_golden.py", "tests/schedules/cuda/test_cuda_exact.py", "tests/schedules/cuda/test_cuda_tiles.py",
]  # fmt: skip
_MATRICES = "tests/numerics/test_winograd.py"
_WINOGRAD = ["tests/schedules/cuda/test_cuda_winograd.py", "tests/schedules/cuda/test_cuda_winograd_rows.py"]
_WARP_SPECIALIZED = [
    "tests/schedules/cuda/test_cuda_warp_specialized_tiles.py", "tests/schedules/cuda/test_cuda_warp_specialized.py",
    "tests/schedules/cuda/test_cuda_lines.py", "tests/schedules/cuda/test_cuda_copied.py", "tests/schedules/cuda/test_cuda_rearranged.py",
]  # fmt: skip
_PERSISTENT = ["tests/schedules/cuda/test_cuda_persistent.py", "tests/schedules/cuda/test_requantised.py"]
_WINOGRAD_TC = ["tests/schedules/cuda/test_winograd_tc.py", "tests/schedules/cuda/test_winograd_int8.py"]
_SCHEDULED = ["tests/schedules/cuda/test_cuda_scheduled.py", "tests/schedules/cuda/test_cuda_depthwise.py"]
_RECORDS = ["tests/records/test_records.py", "tests/records/test_lookup.py", "tests/records/test_merit.py"]

TESTS: Sequence[tuple[str, Sequence[str]]] = (
    (
        "compute/*",
        [
            "tests/compute/test_lowered.py", "tests/compute/test_im2win_transform.py", "tests/compute/test_properties.py",
            "tests/compute/test_exact.py", "tests/compute/test_hypothesis.py",
        ],
    ),
    ("compute/arithmetic.py", ["tests/spec/test_activations.py", "tests/schedules/test_cpu_dot.py"]),
    ("compute/dot_product.py", ["tests/schedules/test_cpu_dot.py"]),
    ("compute/depthwise.py", ["tests/schedules/test_cpu_depthwise.py", "tests/schedules/test_cpu_dot.py"]),
    ("compute/winograd.py", ["tests/schedules/test_winograd_cpu.py"]),
    ("compute/nest.py", ["tests/schedules/test_cpu_padding.py", "tests/registry/test_registry.py", "tests/schedules/test_cpu_dot.py"]),
    ("compute/lowered.py", ["tests/schedules/cuda/test_cuda_scheduled.py"]),
    ("compute/padded.py", ["tests/schedules/test_cpu_padding.py", "tests/schedules/cuda/test_cuda_scheduled.py"]),
    ("schedules/plain.py", ["tests/compute/test_exact.py", "tests/registry/test_registry.py"]),
    (
        "schedules/cpu/*",
        [
            "tests/schedules/test_registers.py", "tests/schedules/test_cpu_reload.py", "tests/schedules/test_cpu_padding.py",
            "tests/compute/test_exact.py", *_SELECTS_ON_CPUS,
        ],
    ),
    ("schedules/cpu_depthwise/*", ["tests/schedules/test_cpu_depthwise.py", *_SELECTS_ON_CPUS]),
    ("schedules/cpu_winograd/*", ["tests/schedules/test_winograd_cpu.py", *_SELECTS_ON_CPUS]),
    ("schedules/cpu_dot/*", ["tests/schedules/test_cpu_dot.py", "tests/schedules/test_cpu_dot_packing.py", *_SELECTS_ON_CPUS]),
    ("schedules/studies/cpu_ladder.py", ["tests/schedules/test_ladder.py"]),
    ("schedules/studies/cuda_ladder*", ["tests/studies/test_cuda_ladder.py"]),
    ("schedules/studies/sliding.py", ["tests/studies/test_cuda_sliding.py"]),
    ("schedules/studies/winograd_tc/*", [*_WINOGRAD_TC, "tests/schedules/cuda/test_cuda_golden.py"]),
    ("schedules/cuda/*launch_overlap.py", ["tests/schedules/cuda/test_cuda_launch_overlap.py"]),
    ("schedules/cuda/model/*", _MODELS_OF_CUDA),
    ("schedules/cuda/space/*", ["tests/registry/test_floors.py", "tests/registry/test_registry.py"]),
    ("schedules/cuda/*multistage*", _MULTISTAGE),
    ("schedules/cuda/*/floor.py", ["tests/registry/test_floors.py"]),
    ("schedules/cuda/*winograd*", _WINOGRAD),
    ("schedules/cuda/*warp_specialized*", _WARP_SPECIALIZED),
    ("schedules/cuda/*persistent*", [*_PERSISTENT, "tests/schedules/cuda/test_cuda_warp_specialized_tiles.py"]),
    ("schedules/cuda/*split_k*", ["tests/schedules/cuda/test_cuda_split.py"]),
    ("schedules/cuda/*depthwise*", _SCHEDULED[1:]),
    ("schedules/cuda/*scheduled*", _SCHEDULED),
    ("schedules/cuda/kernels/output_parts.py", ["tests/schedules/cuda/test_cuda_parts.py"]),
    ("schedules/cuda/kernels/pixel_copy.py", ["tests/schedules/cuda/test_cuda_copied.py"]),
    ("schedules/cuda/kernels/channels_last_copy.py", ["tests/schedules/cuda/test_cuda_channels_last.py"]),
    ("schedules/cuda/tiles/copied_pixels.py", ["tests/schedules/cuda/test_cuda_channels_last.py"]),
    ("schedules/cuda/*/window_row*.py", ["tests/schedules/cuda/test_cuda_window_rows.py"]),
    ("schedules/cuda/families/base.py", [*_MULTISTAGE, "tests/registry/test_registry.py"]),
    ("schedules/cuda/families/tma.py", [*_PERSISTENT, *_WARP_SPECIALIZED]),
    ("schedules/cuda/legality/boxes.py", [*_PERSISTENT, *_WARP_SPECIALIZED]),
    ("schedules/cuda/tiles/base.py", [*_MULTISTAGE, *_WARP_SPECIALIZED]),
    ("schedules/cuda/tiles/fields.py", _WARP_SPECIALIZED),
    ("schedules/cuda/tiles/halo_tiles.py", [*_WARP_SPECIALIZED, *_PERSISTENT]),
    ("schedules/cuda/tiles/rearranged.py", _WARP_SPECIALIZED),
    ("schedules/cuda/tiles/*_lines.py", _WARP_SPECIALIZED),
    ("schedules/cuda/loaders/*boxes.py", [*_WARP_SPECIALIZED, *_PERSISTENT]),
    ("schedules/cuda/loaders/*", _MULTISTAGE),
    ("schedules/cuda/mma/wgmma*", [*_WARP_SPECIALIZED, *_PERSISTENT]),
    ("schedules/cuda/mma/shared_instructions.py", [*_WARP_SPECIALIZED, *_PERSISTENT]),
    ("schedules/cuda/mma/[!w]*", [*_MULTISTAGE, "tests/schedules/cuda/test_cuda_accuracy.py"]),
    ("schedules/cuda/mainloop/*", [*_WARP_SPECIALIZED, *_PERSISTENT]),
    ("schedules/cuda/epilogue/*", [*_MULTISTAGE, *_WARP_SPECIALIZED, *_PERSISTENT]),
    ("schedules/cuda/[apw]*.py", _MULTISTAGE),
    ("schedules/cuda/arithmetic.py", ["tests/schedules/cuda/test_cuda_accuracy.py", "tests/spec/test_dtypes.py"]),
    ("src/im2win/records/*", _RECORDS),
    ("src/im2win/records/checksum.py", ["tests/records/test_logs.py"]),
    ("src/im2win/records/em*.py", ["tests/records/test_emission.py", "tests/records/test_emitted_before.py"]),
    ("src/im2win/records/folders.py", ["tests/records/test_folders.py"]),
    ("src/im2win/records/log.py", ["tests/records/test_logs.py"]),
    ("src/im2win/records/record.py", ["tests/records/test_logs.py", "tests/tuner/test_finals.py"]),
    ("src/im2win/records/proofs.py", ["tests/records/test_proofs.py", "tests/cli/test_logs_standings.py"]),
    ("src/im2win/records/standings.py", ["tests/records/test_standings.py", "tests/cli/test_logs_standings.py"]),
    (
        "src/im2win/records/lookup.py",
        [
            "tests/records/test_lookup.py", "tests/records/test_merit.py", "tests/records/test_proofs.py",
            "tests/records/test_emitted_before.py", "tests/schedules/cuda/test_cuda_bfloat16.py",
        ],
    ),
    ("src/im2win/records/tiers.py", ["tests/builder/test_selections.py"]),
    ("src/im2win/numerics/*", [_MATRICES]),
    (
        "src/im2win/numerics/[rt]*.py",
        [
            "tests/numerics/test_tolerance.py", "tests/compute/test_random.py", "tests/spec/test_activations.py",
            "tests/tuner/test_runner.py", "tests/schedules/cuda/test_requantised.py",
        ],
    ),
    ("src/im2win/numerics/winograd_*.py", [_MATRICES, *_WINOGRAD, "tests/schedules/test_winograd_cpu.py"]),
    ("src/im2win/numerics/winograd_int8.py", _WINOGRAD_TC),
    ("src/im2win/numerics/winograd_[em]*.py", [_MATRICES, *_WINOGRAD_TC]),
    ("src/im2win/numerics/matvec_program.py", [_MATRICES, *_WINOGRAD, "tests/schedules/test_winograd_cpu.py"]),
    (
        "reconstruct/*",
        [
            "tests/reconstruct/test_reconstruct.py", "tests/reconstruct/test_reconstruct_unit.py",
            "tests/reconstruct/test_reconstruct_barriers.py", "tests/reconstruct/test_reconstruct_steps.py",
            "tests/reconstruct/test_reconstruct_wide.py", "tests/reconstruct/test_reconstruct_registers.py",
            "tests/reconstruct/test_reconstruct_im2win.py",
            "tests/reconstruct/test_reconstruct_search.py", "tests/reconstruct/test_reconstruct_fusion.py",
            "tests/reconstruct/test_reconstruct_random.py", "tests/reconstruct/test_reconstruct_module.py",
        ],
    ),
    ("reconstruct/rules/hip.py", ["tests/reconstruct/test_reconstruct_hip.py"]),
    ("reconstruct/rulesets.py", ["tests/reconstruct/test_reconstruct_cli.py"]),
    ("reconstruct/fusion/*", ["tests/schedules/cuda/test_winograd_tc.py"]),
)  # fmt: skip

TIMED = ("tests/records/test_lookup.py::test_look_up_in_a_folder_of_2000_layers_is_quick",)
"""Tests that also fail because other processes keep the machine busy: they run neither with mutants nor without."""


def catching(file: str) -> list[str]:
    """The files of tests, or single tests, that should notice a change of a file, in the order in which they run."""
    return list(dict.fromkeys(test for pattern, tests in reversed(TESTS) if fnmatch(file, pattern) for test in tests))
