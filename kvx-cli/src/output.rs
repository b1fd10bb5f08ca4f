//! What the program prints: text for people, or one JSON document.

use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use kvx_core::{Error, Result};
use serde::Serialize;

/// Where a command's result goes. Standard output holds nothing else.
#[derive(Debug)]
pub(crate) struct Output {
    json: bool,
    out: io::Stdout,
}

/// What the program was asked to print at its end, and whether it has. Whichever thread prints it has this meanwhile.
static END: Mutex<End> = Mutex::new(End { json: false, is_said: false });

#[derive(Debug)]
struct End {
    json: bool,
    is_said: bool,
}

fn end() -> MutexGuard<'static, End> {
    END.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Output {
    /// Standard output, for JSON or for people.
    #[must_use]
    pub(crate) fn new(json: bool) -> Self {
        end().json = json;
        Self { json, out: io::stdout() }
    }

    /// Whether it takes one JSON document rather than text.
    #[must_use]
    pub(crate) const fn is_json(&self) -> bool {
        self.json
    }

    /// Prints a line for people; nothing where JSON was asked for.
    ///
    /// # Errors
    ///
    /// When standard output cannot be written, for example because its reader is gone.
    pub(crate) fn line(&mut self, text: impl AsRef<str>) -> io::Result<()> {
        if self.json { Ok(()) } else { writeln!(self.out, "{}", text.as_ref()) }
    }

    /// Prints a table for people; nothing where JSON was asked for.
    ///
    /// # Errors
    ///
    /// As for [`line`](Self::line).
    pub(crate) fn table(&mut self, table: &Table) -> io::Result<()> {
        self.line(table.trim_fmt())
    }

    /// Prints the JSON document, where that was asked for. There is one.
    ///
    /// # Errors
    ///
    /// As for [`line`](Self::line).
    pub(crate) fn document(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut end = end();
        end.is_said = true;
        if self.json { print(&mut self.out, value) } else { Ok(()) }
    }
}

/// Ends the program from a thread that does not have its output, with an error; does nothing where its result was printed.
pub(crate) fn last_words(said: &str, document: &impl Serialize, exit: impl FnOnce()) {
    let end = end();
    if end.is_said {
        return;
    }
    note(said);
    if end.json {
        // The exit code tells of the error in any case.
        let _unread = print(&mut io::stdout(), document);
    }
    // Nobody else says anything before that.
    exit();
}

fn print(out: &mut io::Stdout, value: &impl Serialize) -> io::Result<()> {
    let mut out = out.lock();
    serde_json::to_writer(&mut out, value)?;
    writeln!(out)?;
    out.flush()
}

/// Columns of text where nobody says how many there are.
const WIDTH: u16 = 100;
/// Fewer are of no use.
const LEAST_WIDTH: u16 = 40;
/// More are not read.
const MOST_WIDTH: u16 = 140;

/// A rule under the column heads, and no other.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::new(' ', '─', ' ', ' '));

/// An empty table with these column heads. Numbers, in the columns from `numbers` on, are aligned to the right.
#[must_use]
pub(crate) fn table(heads: &[&str], numbers: usize) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Disabled).set_header(heads);
    for column in table.column_iter_mut().skip(numbers) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// As [`table`], of text that is wrapped to the width of the terminal, or to [`WIDTH`] where there is none.
#[must_use]
pub(crate) fn wrapped(heads: &[&str]) -> Table {
    let mut table = table(heads, heads.len());
    table.set_content_arrangement(ContentArrangement::Dynamic);
    let width = terminal_width().unwrap_or(WIDTH);
    table.set_width(width.clamp(LEAST_WIDTH, MOST_WIDTH));
    table
}

/// Columns of standard output, where that is a terminal.
fn terminal_width() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0).then_some(size.ws_col)
}

/// Refuses `-`, which is standard output to many programs, and would be a file of that name.
///
/// # Errors
///
/// It is that.
pub(crate) fn refuse_dash(option: &'static str, path: &Path) -> Result<()> {
    if path.as_os_str() != "-" {
        return Ok(());
    }
    Err(Error::config(option, "- is no file's name")
        .with_remedy("name a file; ./- is one, and /dev/stdout is where the text goes, too"))
}

/// Prints a line for people to standard error. What cannot be printed there cannot be told to anyone.
pub(crate) fn note(text: impl AsRef<str>) {
    let _unread = writeln!(io::stderr().lock(), "{}", text.as_ref());
}
