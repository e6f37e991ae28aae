// Package plot draws the two kinds of chart that the results pages need, as SVG.
package plot

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"slices"
	"strconv"

	xfont "golang.org/x/image/font"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

// A Reference is a line across a chart at a value, such as a limit.
type Reference struct {
	At    float64
	Label string
}

// Lengths are points.
const (
	width       vg.Length = 600
	margin      vg.Length = 10
	titleHeight vg.Length = 24
	axisHeight  vg.Length = 52 // with the references' labels
	rowHeight   vg.Length = 24
	linesHeight vg.Length = 250
	legendLine  vg.Length = 15
	nameGap     vg.Length = 24 // for fonts that are wider than the one that is measured
	fontSize    vg.Length = 10
	titleSize   vg.Length = 11.5
	headroom              = 1.04
)

// A browser tries these font families in turn. Widths are measured with the first one. The others are alike.
const families = "Liberation Sans,Arial,Helvetica,sans-serif"

// colours can be distinguished in grey, and by people with red-green colour blindness.
var colours = []color.NRGBA{
	{0x00, 0x72, 0xb2, 0xff}, {0xd5, 0x5e, 0x00, 0xff}, {0x00, 0x9e, 0x73, 0xff},
	{0xcc, 0x79, 0xa7, 0xff}, {0xe6, 0x9f, 0x00, 0xff}, {0x56, 0xb4, 0xe9, 0xff},
}

func colour(i int) color.NRGBA { return colours[i%len(colours)] }

func faint(c color.NRGBA, share float64) color.NRGBA {
	c.A = uint8(255 * share)
	return c
}

// Dots has a row for each name, with a dot for each value and a bar at the median.
type Dots struct {
	Title, X   string
	References []Reference
	rows       []row
}

type row struct {
	name   string
	values []float64
}

// Add adds a row. Values that are not finite are left out.
func (d *Dots) Add(name string, values []float64) { d.rows = append(d.rows, row{name, finite(values)}) }

// SVG returns the drawing.
func (d *Dots) SVG() []byte {
	p := newChart(d.X, "")
	p.Add(&plotter.Grid{Vertical: draw.LineStyle{Color: color.Gray{0xdd}, Width: 0.75}})
	high, top := 0.0, float64(len(d.rows))-0.5
	for _, r := range d.References {
		high = max(high, r.At)
		p.Add(reference(plotter.XYs{{X: r.At, Y: -0.5}, {X: r.At, Y: top}}), label(r.At, top, r.Label, draw.XRight, vg.Point{Y: 3}))
	}
	names := make([]string, len(d.rows))
	for i, r := range d.rows {
		at := len(d.rows) - 1 - i // the first row is the highest
		names[at] = r.name
		y := float64(at)
		if len(r.values) == 0 {
			p.Add(label(0, y, "failed", draw.XLeft, vg.Point{X: 5, Y: -fontSize / 3}))
			continue
		}
		var points plotter.XYs
		for _, v := range r.values {
			high = max(high, v)
			points = append(points, plotter.XY{X: v, Y: y})
		}
		median := stats.Median(r.values)
		p.Add(
			&plotter.Scatter{XYs: points, GlyphStyle: draw.GlyphStyle{Color: faint(colour(i), 0.5), Radius: 3, Shape: draw.CircleGlyph{}}},
			line(plotter.XYs{{X: median, Y: y - 0.33}, {X: median, Y: y + 0.33}}, colour(i), 2.5),
		)
	}
	if len(names) > 0 {
		p.NominalY(names...)
	}
	p.Y.Padding = nameGap
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, upTo(high), -0.5, max(top, 0.5)
	return render(d.Title, p, rowHeight*vg.Length(len(d.rows))+axisHeight, plot.NewLegend(), 0)
}

// Lines has a line for each series of points, from left to right.
type Lines struct {
	Title, X, Y string
	References  []Reference
	// LogX makes the horizontal axis logarithmic, from the least point on.
	LogX   bool
	series []series
}

type series struct {
	name   string
	colour color.NRGBA
	points plotter.XYs
}

// Add adds a line. A line without a name has the colour of the line before.
func (l *Lines) Add(name string, points [][2]float64) {
	named := 0
	for _, s := range l.series {
		if s.name != "" {
			named++
		}
	}
	if name == "" {
		named = max(named-1, 0)
	}
	s := series{name: name, colour: colour(named)}
	for _, p := range points {
		s.points = append(s.points, plotter.XY{X: p[0], Y: p[1]})
	}
	l.series = append(l.series, s)
}

// SVG returns the drawing.
func (l *Lines) SVG() []byte {
	p := newChart(l.X, l.Y)
	p.Add(&plotter.Grid{
		Vertical: draw.LineStyle{Color: color.Gray{0xee}, Width: 0.75}, Horizontal: draw.LineStyle{Color: color.Gray{0xdd}, Width: 0.75},
	})
	low, right, high := math.Inf(1), 0.0, 0.0
	legend := plot.NewLegend()
	legend.Top, legend.Left, legend.TextStyle.Font.Size, legend.Padding = true, true, fontSize, 3
	legends := 0
	for _, s := range l.series {
		drawn := line(s.points, faint(s.colour, 0.7), 1.2)
		if len(s.points) > 0 {
			p.Add(drawn)
		}
		for _, point := range s.points {
			low, right, high = min(low, point.X), max(right, point.X), max(high, point.Y)
		}
		if s.name != "" {
			legend.Add(s.name, drawn)
			legends++
		}
	}
	from := 0.0
	if l.LogX && low > 0 && right > low {
		from = low
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, ticks{log: true}
	}
	if right <= from {
		right = from + 1
	}
	for _, r := range l.References {
		high = max(high, r.At)
		p.Add(reference(plotter.XYs{{X: from, Y: r.At}, {X: right, Y: r.At}}), label(right, r.At, r.Label, draw.XRight, vg.Point{Y: 3}))
	}
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = from, right, 0, upTo(high)
	return render(l.Title, p, linesHeight, legend, legendLine*vg.Length(legends))
}

func finite(values []float64) []float64 {
	return slices.DeleteFunc(slices.Clone(values), func(v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) })
}

// upTo is the end of an axis that has this value.
func upTo(high float64) float64 {
	if !(high > 0) || math.IsInf(high, 0) {
		return 1
	}
	return headroom * high
}

// ticks are at 1, 2 or 5 times a power of ten, at most 9 of them; of a logarithmic axis at the powers of ten.
type ticks struct{ log bool }

func (t ticks) Ticks(low, high float64) []plot.Tick {
	if t.log {
		all := slices.DeleteFunc(plot.LogTicks{Prec: -1}.Ticks(low, high), plot.Tick.IsMinor)
		for i := range all {
			all[i].Label = strconv.FormatFloat(all[i].Value, 'f', -1, 64) // without an exponent
		}
		return all
	}
	step := math.Pow(10, math.Floor(math.Log10((high-low)/8)))
	for _, factor := range []float64{2, 2.5, 2} {
		if (high-low)/step > 8 {
			step *= factor
		}
	}
	digits := max(0, -int(math.Floor(math.Log10(step)+1e-9)))
	var all []plot.Tick
	for i := math.Ceil(low / step); i*step <= high; i++ {
		all = append(all, plot.Tick{Value: i * step, Label: fmt.Sprintf("%.*f", digits, i*step)})
	}
	return all
}

// newChart has axes without lines, as the grid has those.
func newChart(x, y string) *plot.Plot {
	p := plot.New()
	p.X.Label.Text, p.Y.Label.Text = x, y
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Label.TextStyle.Font.Size, axis.Tick.Label.Font.Size = fontSize, fontSize
		axis.LineStyle.Width, axis.Tick.LineStyle.Width, axis.Tick.Length = 0, 0, 0
		axis.Padding = 4
		axis.Tick.Marker = ticks{}
	}
	return p
}

func line(points plotter.XYs, c color.Color, width vg.Length) *plotter.Line {
	return &plotter.Line{XYs: points, LineStyle: draw.LineStyle{Color: c, Width: width}}
}

func reference(points plotter.XYs) *plotter.Line {
	dashed := line(points, color.Black, 0.75)
	dashed.Dashes = []vg.Length{3, 2}
	return dashed
}

func label(x, y float64, words string, align draw.XAlignment, offset vg.Point) *plotter.Labels {
	return &plotter.Labels{
		XYs: plotter.XYs{{X: x, Y: y}}, Labels: []string{words}, Offset: offset,
		TextStyle: []text.Style{style(fontSize, xfont.WeightNormal, align)},
	}
}

func style(size vg.Length, weight xfont.Weight, align draw.XAlignment) text.Style {
	face := font.From(plot.DefaultFont, size)
	face.Variant, face.Weight = "Sans", weight
	return text.Style{Color: color.Black, Font: face, XAlign: align, Handler: plot.DefaultTextHandler}
}

func init() { plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"} }

// render draws a title, a chart of a height, and below it a legend of another.
func render(title string, p *plot.Plot, height vg.Length, legend plot.Legend, legendHeight vg.Length) []byte {
	height += titleHeight + legendHeight + margin
	canvas := vgsvg.New(width, height)
	c := draw.New(canvas)
	c.SetColor(color.White)
	c.Fill(c.Rectangle.Path())
	c.FillText(style(titleSize, xfont.WeightBold, draw.XLeft), vg.Point{X: margin, Y: height - margin - titleSize/2}, title)
	c = draw.Crop(c, margin, -margin, margin/2, -titleHeight)
	legend.Draw(draw.Crop(c, 0, 0, 0, legendHeight-c.Size().Y))
	c = draw.Crop(c, 0, 0, legendHeight, 0)
	p.BackgroundColor = nil
	p.Draw(c)
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		panic(fmt.Sprintf("plot: writing to memory: %v", err)) // a buffer takes all
	}
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:"+families+";"))
}
