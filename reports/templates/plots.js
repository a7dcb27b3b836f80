const dark = matchMedia('(prefers-color-scheme: dark)');
function draw() {
  const ink = dark.matches ? '#e7eaf0' : '#1c2330', line = dark.matches ? '#333b49' : '#dfe3ea';
  const narrow = innerWidth < 600;
  for (const [key, text] of Object.entries(figures)) {
    const figure = JSON.parse(text), layout = figure.layout;
    layout.font.color = ink;
    for (const axis of ['xaxis', 'yaxis']) Object.assign(layout[axis] ??= {}, { gridcolor: line, zerolinecolor: line });
    for (const menu of layout.updatemenus ?? []) Object.assign(menu, { bgcolor: dark.matches ? '#1c222c' : '#fff', bordercolor: line });
    if (narrow) {
      layout.margin = { l: 48, r: 8, t: 56, b: 48 };
      layout.legend = { orientation: 'h', x: 0, y: -0.25, yanchor: 'top' };
      layout.height += 120;
    }
    Plotly.react('plot-' + key, figure.data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }
}
dark.addEventListener('change', draw);
draw();
