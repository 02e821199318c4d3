from pathlib import Path

from check_pass import check_declaration

import passes


def test_the_tuple_lists_every_file_once() -> None:
    files = {path.stem for path in Path(passes.__file__).parent.glob("*.py")} - {"__init__"}
    names = [kind.name for kind in passes.PASSES]
    assert sorted(names) == sorted(files)


def test_every_pass_is_a_frozen_value_named_after_its_file() -> None:
    for kind in passes.PASSES:
        check_declaration(kind())


def test_equal_options_make_equal_passes() -> None:
    assert all(kind() == kind() and hash(kind()) == hash(kind()) for kind in passes.PASSES)


def test_what_the_pipeline_puts_in_itself_is_listed_too() -> None:
    assert set(passes.AUTOMATIC) <= {kind.name for kind in passes.PASSES}
