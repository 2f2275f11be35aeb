"""What the rules between settings share: their type, the numbers that work, and the rule for idle settings."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from megadiff.config.schema import Config
from megadiff.errors import ConfigError

Check = Callable[[Config], None]


class Idle(NamedTuple):
    """A setting that nothing reads where `is_idle`, because of what `remedy` begins with."""

    section: str
    name: str
    is_idle: bool
    remedy: str


def refuse_idle(config: Config, settings: Iterable[Idle]) -> None:
    """Refuse a value other than the default where another setting makes that it is never read."""
    default = Config()
    for section, name, is_idle, remedy in settings:
        value = getattr(getattr(config, section), name)
        if is_idle and value != getattr(getattr(default, section), name):
            raise ConfigError(f"{section}.{name} = {shown(value)} has no effect with {remedy}")


def shown(value: object) -> object:
    """A value as YAML writes it: tuples are lists there."""
    return list(value) if isinstance(value, tuple) else value


def choices(numbers: Iterable[int]) -> str:
    """List numbers as "1, 2, 4 or 8"."""
    found = [str(number) for number in numbers]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def divisors(number: int, limit: int | None = None) -> str:
    """List the divisors of a number up to a limit as "1, 2, 4 or 8"."""
    return choices(d for d in range(1, min(number, limit or number) + 1) if number % d == 0)
