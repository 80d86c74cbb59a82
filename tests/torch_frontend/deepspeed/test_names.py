"""Every public name of DeepSpeed is taken, taken with a difference, or refused by name; the page says which."""

import inspect
import re
import types
import warnings
from pathlib import Path

import pytest
import torch

from frontends.torch import deepspeed
from offload_core.deepspeed.names import DIFFERS, VERSION, is_theirs, names_not_taken
from tests.support.deepspeed_names import PLACES, table, taken

PAGE = Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md"


@pytest.mark.parametrize("place", PLACES)
def test_the_page_has_the_table_that_the_code_makes(place):
    _, _, text = PAGE.read_text().partition(f"<summary>{PLACES[place]}</summary>\n\n")
    expected = "\n".join(table(place))
    assert text.partition("\n\n")[0] == expected, f"{PAGE}: this table should be\n{expected}"


@pytest.mark.parametrize("place", PLACES)
def test_no_name_is_both_taken_and_refused(place):
    assert not names_not_taken(place) & taken(place)
    assert DIFFERS[place].keys() <= taken(place)


@pytest.fixture(scope="module")
def engine():
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    return deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[0]


def test_each_name_of_the_engine_that_is_taken_is_there(engine):
    for name in taken("engine"):
        getattr(engine, name)


def test_a_name_that_is_refused_names_the_engine_and_what_to_use(engine):
    for name in names_not_taken("engine"):
        with pytest.raises(AttributeError, match=rf"^DeepSpeedEngine\.{name}: DeepSpeed has it.*not taken here; .+"):
            getattr(engine, name)
        assert not hasattr(engine, name)
    with pytest.raises(AttributeError, match="neither DeepSpeedEngine nor its module, a Linear, has .*'nonsense'"):
        engine.nonsense  # noqa: B018
    assert engine.in_features == 2  # the module's own


@pytest.mark.parametrize("place", ["deepspeed", "zero", "utils"])
def test_a_name_of_a_module_that_is_refused_says_what_to_use(place):
    module = deepspeed if place == "deepspeed" else getattr(deepspeed, place)
    for name in names_not_taken(place):
        with pytest.raises(AttributeError, match=rf"{name}: DeepSpeed has it.*not taken here; "):
            getattr(module, name)


@pytest.mark.slow
def test_every_public_name_of_the_installed_package_is_in_one_of_the_tables():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("deepspeed")
    if theirs.__version__ != VERSION:
        pytest.skip(f"the tables are those of DeepSpeed {VERSION}")
    kind = theirs.DeepSpeedEngine
    set_in_it = re.findall(r"self\.([a-z]\w*)(?:: \w+)? = ", inspect.getsource(kind))
    names = {
        "engine": {*dir(kind), *set_in_it} - {*dir(torch.nn.Module)},
        "deepspeed": {*dir(theirs)},
        "zero": {*dir(theirs.zero)},
        "utils": {*dir(theirs.utils)},
    }
    for place, found in names.items():
        missing = {
            name
            for name in found
            if not (
                name.startswith("_")
                or name in taken(place)
                or is_theirs(place, name)
                or is_elsewhere(theirs, place, name)
            )
        }
        assert not missing, f"{place}: {sorted(missing)}"


def is_elsewhere(theirs, place, name):
    """True for what a module only imports: from typing, torch and the like."""
    if place == "engine" or (place, name) == ("utils", "torch"):  # a module beside torch, of helpers
        return place != "engine"
    value = getattr(theirs if place == "deepspeed" else getattr(theirs, place), name)
    home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")
    return (home or "").partition(".")[0] != "deepspeed" and not isinstance(value, str | int)
