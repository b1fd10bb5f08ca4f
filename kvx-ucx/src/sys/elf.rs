//! Whether a library's file is as long as it says. The loader maps what the file says, and a process that reads a page which
//! is not there is ended (`SIGBUS`).

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::sync::OnceLock;

/// Bytes of the header of a file of 64 bits, of a header of a segment, and of one of a section.
const HEADER: usize = 64;
const SEGMENT: usize = 56;
const SECTION: usize = 64;
/// Segments that a library may have, and sections: a table of more is not looked at.
const MOST: usize = 4096;

/// A file that ends too soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) bytes: u64,
    /// How many it says that it has, at least.
    pub(crate) said: u64,
}

/// What is wrong with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    Cut(Cut),
    /// Nothing to be read: the loader would wait for ever for somebody to write to a pipe.
    NoFile,
    /// It is of another processor. The loader says that there is none.
    Processor,
}

/// Looks whether a file has all that its headers announce. `Ok` also where it is none, or no library of 64 bits: the loader says so.
pub(super) fn check(path: &Path) -> Result<(), Wrong> {
    let Ok(kind) = std::fs::metadata(path) else { return Ok(()) };
    if !kind.is_file() {
        return Err(Wrong::NoFile);
    }
    let Ok(mut file) = File::open(path) else { return Ok(()) };
    let mut begin = [0; HEADER];
    if file.read_exact(&mut begin).is_ok() && is_library(&begin) && own_processor().is_some_and(|own| own != processor(&begin)) {
        return Err(Wrong::Processor);
    }
    if file.seek(SeekFrom::Start(0)).is_err() {
        return Ok(());
    }
    let bytes = kind.len();
    match said(&mut file) {
        Some(said) if said > bytes => Err(Wrong::Cut(Cut { bytes, said })),
        _ => Ok(()),
    }
}

/// Whether a file of 64 bits begins so.
fn is_library(header: &[u8; HEADER]) -> bool {
    let own_order = if cfg!(target_endian = "little") { 1 } else { 2 };
    header[..6] == [0x7f, b'E', b'L', b'F', 2, own_order]
}

/// `e_machine`.
fn processor(header: &[u8; HEADER]) -> u16 {
    u16::from_ne_bytes([header[18], header[19]])
}

/// That of this program. Where it cannot be read, none is wrong.
fn own_processor() -> Option<u16> {
    static OWN: OnceLock<Option<u16>> = OnceLock::new();
    *OWN.get_or_init(|| {
        let mut header = [0; HEADER];
        File::open("/proc/self/exe").ok()?.read_exact(&mut header).ok()?;
        Some(processor(&header))
    })
}

/// The end of the last segment or section. Where the tables that say so are cut off, the end of these.
fn said(file: &mut File) -> Option<u64> {
    let mut header = [0; HEADER];
    file.read_exact(&mut header).ok()?;
    if !is_library(&header) {
        return None;
    }
    let (segments, sections) = (word(&header, 32), word(&header, 40));
    let number = |at: usize| usize::from(u16::from_ne_bytes([header[at], header[at + 1]]));
    // Of a segment, and of a section: where in the file it begins, and how many bytes of it are there.
    let of_segment = |entry: &[u8]| word(entry, 8).saturating_add(word(entry, 32));
    let of_section = |entry: &[u8]| {
        const NO_BYTES: u32 = 8;
        let kind = u32::from_ne_bytes([entry[4], entry[5], entry[6], entry[7]]);
        if kind == NO_BYTES { 0 } else { word(entry, 24).saturating_add(word(entry, 32)) }
    };
    let mut end = HEADER as u64;
    end = end.max(last(file, segments, (number(54), SEGMENT), number(56), of_segment));
    end = end.max(last(file, sections, (number(58), SECTION), number(60), of_section));
    Some(end)
}

/// The end of a table, or of the last of what it names.
fn last(file: &mut File, from: u64, (size, known): (usize, usize), count: usize, end: impl Fn(&[u8]) -> u64) -> u64 {
    if from == 0 || count == 0 || count > MOST || size != known {
        return 0;
    }
    let mut table = vec![0; size * count];
    let of_table = from.saturating_add(table.len() as u64);
    if file.seek(SeekFrom::Start(from)).and_then(|_| file.read_exact(&mut table)).is_err() {
        return of_table;
    }
    table.chunks_exact(size).map(end).fold(of_table, u64::max)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]))
}

#[cfg(test)]
mod tests {
    use std::{env, fs, process};

    use super::*;

    /// This program, which is such a file, too.
    #[test]
    fn what_is_cut_off_is_found_at_every_length() {
        let own = env::current_exe().unwrap();
        assert_eq!(check(&own), Ok(()));
        let path = env::temp_dir().join(format!("kvx-ucx-elf-{}", process::id()));
        fs::copy(&own, &path).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let whole = said(&mut File::open(&own).unwrap()).unwrap();
        for left in [whole - 1, whole / 2, 4096, 100, HEADER as u64] {
            file.set_len(left).unwrap();
            let Err(Wrong::Cut(cut)) = check(&path) else { panic!("{left} bytes") };
            assert!(cut.bytes == left && cut.said > left && cut.said <= whole, "{cut:?}");
        }
        // What has no whole header is no such file: so says the loader.
        for left in [63, 4, 0] {
            file.set_len(left).unwrap();
            assert_eq!(check(&path), Ok(()), "{left}");
        }
        fs::write(&path, "a text, and longer than a header of sixty-four bytes would have to be to be read").unwrap();
        assert_eq!(check(&path), Ok(()));
        fs::remove_file(&path).unwrap();
        assert_eq!(check(&path), Ok(()));
        assert_eq!(check(Path::new("/dev/null")), Err(Wrong::NoFile));
        // The same file, but for the processor.
        let mut bytes = fs::read(&own).unwrap();
        bytes[18] ^= 1;
        fs::write(&path, bytes).unwrap();
        assert_eq!(check(&path), Err(Wrong::Processor));
        fs::remove_file(&path).unwrap();
    }
}
