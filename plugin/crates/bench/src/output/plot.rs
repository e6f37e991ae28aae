//! Lines over logarithmic axes, as SVG.

use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 70.0;
/// Told apart in grey and by people who see no red.
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// A drawing.
#[derive(Debug)]
pub(crate) struct Chart {
    pub(crate) title: String,
    /// What the axes are.
    pub(crate) x: String,
    pub(crate) y: String,
    pub(crate) lines: Vec<Line>,
}

/// A line of it, from left to right. Points that are not positive have no place.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Lays logarithms over a stretch of the drawing, from one power of ten to another.
struct Scale {
    low: i32,
    high: i32,
    from: f64,
    to: f64,
}

impl Scale {
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (least, most) = values
            .filter(|value| value.is_finite() && *value > 0.0)
            .fold((f64::MAX, 0.0f64), |(least, most), value| (least.min(value), most.max(value)));
        if most == 0.0 {
            return Self { low: 0, high: 1, from, to };
        }
        let low = least.log10().floor() as i32;
        Self { low, high: (most.log10().ceil() as i32).max(low + 1), from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let share = (value.log10() - f64::from(self.low)) / f64::from(self.high - self.low);
        self.from + (self.to - self.from) * share
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

impl Chart {
    /// The drawing's text.
    pub(crate) fn draw(&self) -> String {
        let points = || {
            let all = self.lines.iter().flat_map(|line| &line.points);
            all.filter(|(x, y)| *x > 0.0 && *y > 0.0).copied()
        };
        let x = Scale::over(points().map(|point| point.0), LEFT, WIDTH - RIGHT);
        let y = Scale::over(points().map(|point| point.1), HEIGHT - BOTTOM, TOP);
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
             <text x=\"10\" y=\"18\" font-size=\"14\" font-weight=\"bold\">{}</text>",
            escaped(&self.title)
        );
        let mut line = |from: (f64, f64), to: (f64, f64), label: (f64, f64, &str), power: i32| {
            let ((x1, y1), (x2, y2), (x, y, anchor)) = (from, to, label);
            let _ = writeln!(
                out,
                "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#ddd\"/>\n\
                 <text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
                10f64.powi(power)
            );
        };
        for power in x.low..=x.high {
            let at = x.at(10f64.powi(power));
            line((at, TOP), (at, y.from), (at, y.from + 16.0, "middle"), power);
        }
        for power in y.low..=y.high {
            let at = y.at(10f64.powi(power));
            line((LEFT, at), (x.to, at), (LEFT - 6.0, at + 4.0, "end"), power);
        }
        let middle = f64::midpoint(LEFT, x.to);
        let _ = writeln!(
            out,
            "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            y.from + 34.0,
            escaped(&self.x),
            LEFT - 6.0,
            TOP - 8.0,
            escaped(&self.y)
        );
        for (number, line) in self.lines.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let places: Vec<String> = line
                .points
                .iter()
                .filter(|(x, y)| *x > 0.0 && *y > 0.0)
                .map(|(a, b)| format!("{:.1},{:.1}", x.at(*a), y.at(*b)))
                .collect();
            let (left, down) = (LEFT + 120.0 * number as f64, HEIGHT - 16.0);
            let _ = writeln!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>\n\
                 <line x1=\"{left:.1}\" y1=\"{down:.1}\" x2=\"{:.1}\" y2=\"{down:.1}\" stroke=\"{colour}\"/>\n\
                 <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                places.join(" "),
                left + 20.0,
                left + 28.0,
                down + 4.0,
                escaped(&line.name)
            );
        }
        out.push_str("</svg>\n");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plot_axis_is_logarithmic() {
        let scale = Scale::over([3.0, 5000.0].into_iter(), 0.0, 100.0);
        assert_eq!((scale.low, scale.high), (0, 4));
        assert!((scale.at(100.0) - 50.0).abs() < 1e-9);
    }

    #[test]
    fn plot_draws_all_lines_and_escapes_text() {
        let line = |name: &str, points: &[(f64, f64)]| Line {
            name: name.to_owned(),
            points: points.to_vec(),
        };
        let lines = vec![line("a & b", &[(1.0, 10.0), (10.0, 20.0)]), line("none", &[(0.0, 1.0)])];
        let chart =
            Chart { title: "x < y".to_owned(), x: "x".to_owned(), y: "us".to_owned(), lines };
        let drawn = chart.draw();
        for part in ["x &lt; y", "a &amp; b", "points=\"70.0,330.0 736.0,"] {
            assert!(drawn.contains(part), "{part}: {drawn}");
        }
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
    }
}
