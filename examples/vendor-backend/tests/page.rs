//! The code in `docs/writing-a-backend.md` is this crate's: each block is somewhere in the file that it is from.

use std::path::Path;

/// Lines without the indentation that all of them have.
fn flush(lines: &[&str]) -> Vec<String> {
    let written = lines.iter().filter(|line| !line.trim().is_empty());
    let indent = written.map(|line| line.len() - line.trim_start().len()).min().unwrap_or(0);
    lines.iter().map(|line| line.get(indent..).unwrap_or_default().to_owned()).collect()
}

#[test]
fn code_on_the_page_is_code_of_this_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/writing-a-backend.md")).unwrap();
    let lines: Vec<&str> = page.lines().collect();
    let (mut compared, mut at) = (0, 0);
    while at < lines.len() {
        let Some(kind) = lines[at].strip_prefix("```").filter(|kind| !kind.is_empty()) else {
            at += 1;
            continue;
        };
        let first = at + 1;
        let length = lines[first..].iter().position(|line| *line == "```").unwrap();
        at = first + length + 1;
        if !matches!(kind, "rust" | "toml") {
            continue;
        }
        let origin = lines[first - 2].strip_prefix("<!-- from ");
        let origin = origin.and_then(|rest| rest.strip_suffix(" -->"));
        let origin = origin.unwrap_or_else(|| panic!("line {first}: no file is said before it"));
        let file = std::fs::read_to_string(root.join(origin)).unwrap();
        let file: Vec<&str> = file.lines().collect();
        let block = flush(&lines[first..first + length]);
        assert!(
            file.windows(block.len()).any(|part| flush(part) == block),
            "line {first}: this is not in {origin}:\n{}",
            block.join("\n")
        );
        compared += 1;
    }
    assert!(compared > 12, "only {compared} blocks were found");
}
