//! Files that are written whole or not at all.

use std::fs;
use std::io;
use std::path::Path;

/// Writes a file, in place of what was there, which stays where that fails. What is no file, as `/dev/stdout`, is written to.
///
/// # Errors
///
/// The system's.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    // A link stays, and what it names is replaced.
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return fs::write(path, text);
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let beside = path.with_file_name(name);
    let written = fs::write(&beside, text).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        // The first failure is the one to be told.
        let _left = fs::remove_file(&beside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> std::path::PathBuf {
        let folder = std::env::temp_dir().join(format!("kvx-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_file_is_replaced_and_a_link_goes_on_to_name_it() {
        let folder = folder("replace");
        let (file, link) = (folder.join("a.svg"), folder.join("b.svg"));
        replace(&file, "one").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        replace(&link, "two").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "two");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
        fs::remove_dir_all(&folder).unwrap();
    }

    /// A disk that is full.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_no_file_is_written_to() {
        assert!(replace(Path::new("/dev/null"), "text").is_ok());
        let full = Path::new("/dev/full");
        if full.exists() {
            assert_eq!(replace(full, "text").unwrap_err().raw_os_error(), Some(28));
        }
    }

    #[test]
    fn what_was_there_stays_where_it_cannot_be_replaced() {
        let folder = folder("stays");
        let file = folder.join("x".repeat(250));
        fs::write(&file, "old").unwrap();
        // The name of the new one is too long.
        assert!(replace(&file, "new").is_err());
        assert_eq!(fs::read_to_string(&file).unwrap(), "old");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(&folder).unwrap();
    }
}
