"use strict";
// The box above a long table shows the rows that have all its words. The address keeps them: families/#filter=llama
for (const box of document.querySelectorAll(".long input")) {
  const table = box.closest(".long"), rows = [...table.querySelectorAll("tbody tr")];
  const count = table.querySelector("output");
  const show = () => {
    const words = box.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  box.value = new URLSearchParams(location.hash.slice(1)).get("filter") || "";
  box.addEventListener("input", show);
  show();
}
