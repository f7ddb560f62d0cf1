for (const place of document.querySelectorAll(".chart")) {
  const { data, layout } = JSON.parse(place.querySelector("script").textContent);
  const buttons = ["select2d", "lasso2d", "sendChartToCloud"];
  const settings = { displaylogo: false, responsive: true, modeBarButtonsToRemove: buttons };
  Plotly.newPlot(place.appendChild(document.createElement("div")), data, layout, settings);
}
