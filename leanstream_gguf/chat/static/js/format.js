// Numbers and times for people; the same units as the command line.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let amount = Math.abs(value);
  let unit = 0;
  while (amount >= 1023.5 && unit < UNITS.length - 1) {
    amount /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || amount >= 100 || Number.isInteger(amount) ? 0 : amount >= 10 ? 1 : 2;
  return `${value < 0 ? "-" : ""}${amount.toFixed(digits)} ${UNITS[unit]}`;
}

export const rate = (value) => (value === null || value === undefined ? "–" : `${bytes(value)}/s`);

export const percent = (value) => (value === null || value === undefined ? "–" : `${(value * 100).toFixed(value > 0.995 && value < 1 ? 1 : 0)} %`);

export function number(value, digits = 1) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? value.toFixed(0) : value.toFixed(digits);
}

export const integer = (value) => value.toLocaleString("en-US");

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 1) return "less than a second";
  if (value < 60) return `${Math.round(value)} s`;
  const minutes = Math.round(value / 60);
  return minutes < 60 ? `${minutes} min` : `${(value / 3600).toFixed(1)} h`;
}

/** "2 min ago", "yesterday", "3 Mar". */
export function ago(unixSeconds) {
  const passed = Date.now() / 1000 - unixSeconds;
  if (passed < 60) return "now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h`;
  return new Date(unixSeconds * 1000).toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

/** The heading under which a conversation of this age is listed. */
export function period(unixSeconds) {
  const today = new Date();
  today.setHours(0, 0, 0, 0);
  const days = (today.getTime() / 1000 - unixSeconds) / 86400;
  if (days <= 0) return "Today";
  if (days <= 1) return "Yesterday";
  if (days <= 7) return "Last 7 days";
  if (days <= 30) return "Last 30 days";
  return "Older";
}
