"""Colors of the dashboards: distinguishable with each kind of color blindness, and visible on both themes of Grafana."""

from __future__ import annotations

import itertools

import dashboards_support  # noqa: F401  # the import makes the dashboards importable
import pytest

from dashboards.palette import ABSENT, BAD, BADPUT_CAUSE_COLORS, GOOD, THROTTLE_REASON_COLORS, WARNING

Rgb = tuple[float, float, float]
VISIONS: dict[str, tuple[Rgb, Rgb, Rgb]] = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
"""Matrices in linear RGB that simulate a vision, from Machado, Oliveira and Fernandes (2009), severity 1."""
BACKGROUNDS = {"dark": "#181b1f", "light": "#ffffff"}
MIN_CONTRAST = 1.8
"""Minimum contrast ratio of a color to a background, computed as in WCAG 2."""
STATUS_COLORS = {"good": GOOD, "warning": WARNING, "bad": BAD, "absent": ABSENT}


def linear_rgb(color: str) -> Rgb:
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return _linear(red), _linear(green), _linear(blue)


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)


def luminance(rgb: Rgb) -> float:
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]


def lab(rgb: Rgb) -> Rgb:
    """Return a color in the color space CIELAB, in which the distance of two colors is the perceived difference."""
    red, green, blue = rgb
    x, y, z = (
        ratio ** (1 / 3) if ratio > 0.008856 else 7.787 * ratio + 16 / 116
        for ratio in (
            (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
            luminance(rgb),
            (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
        )
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def perceived(color: str, vision: str) -> Rgb:
    """Return a color in CIELAB as a person with this vision perceives it."""
    rgb = linear_rgb(color)
    red, green, blue = (
        min(1.0, max(0.0, sum(weight * channel for weight, channel in zip(row, rgb, strict=True))))
        for row in VISIONS[vision]
    )
    return lab((red, green, blue))


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize(
    ("colors", "min_difference"),
    [(STATUS_COLORS, 15), (BADPUT_CAUSE_COLORS, 8)],
    ids=["states", "causes of badput"],
)
def test_colors_are_distinguishable_with_each_kind_of_color_blindness(
    colors: dict[str, str], min_difference: float, vision: str
) -> None:
    # In CIELAB, people see a difference of about 2 between two colors that touch. Lines of a plot do not touch.
    for (name, color), (other_name, other_color) in itertools.combinations(colors.items(), 2):
        differences = zip(perceived(color, vision), perceived(other_color, vision), strict=True)
        difference = sum((value - other) ** 2 for value, other in differences) ** 0.5

        assert difference >= min_difference, (name, other_name)


@pytest.mark.parametrize("theme", BACKGROUNDS)
def test_colors_are_visible_on_the_background_of_each_theme(theme: str) -> None:
    background = luminance(linear_rgb(BACKGROUNDS[theme]))
    for name, color in (STATUS_COLORS | BADPUT_CAUSE_COLORS | THROTTLE_REASON_COLORS).items():
        darker, lighter = sorted((luminance(linear_rgb(color)), background))

        assert (lighter + 0.05) / (darker + 0.05) >= MIN_CONTRAST, name
