"""Settings that have an effect only with one value of another setting, the switch."""

from typing import Any

from vitlab.errors import UserError

ABOVE_0 = "above 0"
REQUIRED_SWITCHES: dict[str, dict[str, tuple[str, Any]]] = {
    "optim": {
        "momentum": ("name", "sgd"),
        "beta1": ("name", "adam"),
        "beta2": ("name", "adam"),
        "end_lr": ("schedule", "linear"),
        "decay_on": ("weight_decay", ABOVE_0),
    },
    "data": {
        "min_area": ("crop", "inception"),
        "pad": ("crop", "pad"),
        "crop_resize": ("crop", "random"),
        "randaugment_magnitude": ("randaugment_layers", ABOVE_0),
    },
}
"""Settings that have an effect only with one value of another setting of their section, the switch: setting -> (switch,
value). With any other value they must keep their default."""


def has_effect(value: Any, wanted: Any) -> bool:
    """Whether a switch of REQUIRED_SWITCHES with this value gives the setting an effect."""
    return value > 0 if wanted == ABOVE_0 else value == wanted


def check_switches(config: Any) -> None:
    """Raises UserError for a setting that its switch leaves without effect."""
    for section, settings in REQUIRED_SWITCHES.items():
        part = getattr(config, section)
        for name, (switch, wanted) in settings.items():
            value, default, current = getattr(part, name), getattr(type(part), name), getattr(part, switch)
            if value != default and not has_effect(current, wanted):
                required = f"{section}.{switch} {wanted}" if wanted == ABOVE_0 else f"{section}.{switch}={wanted!r}"
                raise UserError(
                    f"{section}.{name}={value!r} has no effect with {section}.{switch}={current!r}; give "
                    f"{required} too, or leave {section}.{name} at {default!r}."
                )
