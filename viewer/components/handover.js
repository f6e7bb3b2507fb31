// Delivers content that Python created, as a download or as text for the clipboard.

function handOver(message) {
  const file = message.data ?? message;
  const bytes = Uint8Array.from(atob(file.content), (letter) => letter.charCodeAt(0));
  if (!file.name) {
    toClipboard(new TextDecoder().decode(bytes));
    return;
  }
  offer(new Blob([bytes], { type: file.kind }), file.name);
}

function offer(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// The clipboard API is available only on trusted origins (this machine, https).
function toClipboard(text) {
  const old = () => {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  };
  if (navigator.clipboard) navigator.clipboard.writeText(text).catch(old);
  else old();
}
