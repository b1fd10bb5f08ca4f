//! The key that all engines of one deployment share.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use kvx_core::{Error, ErrorKind, Result};
use rand::TryRng as _;
use zeroize::Zeroizing;

/// What a key's file begins with; 64 hexadecimal digits follow.
const PREFIX: &str = "kvx-key-1:";
/// Most bytes of a key's file.
const MAX_FILE_BYTES: usize = 256;

/// A secret of 32 random bytes that all engines of one deployment share: who has it may talk to them, nobody else.
///
/// It is never printed, and wiped from memory when dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Zeroizing<[u8; 32]>);

impl Key {
    /// A new key, from the operating system's random number generator.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Resources`]: it gives no random bytes.
    pub fn generate() -> Result<Self> {
        let mut bytes = Zeroizing::new([0; 32]);
        rand::rngs::SysRng.try_fill_bytes(bytes.as_mut_slice()).map_err(|source| {
            Error::new(ErrorKind::Resources, "key", "the operating system gave no random bytes")
                .with_source(source)
        })?;
        Ok(Self(bytes))
    }

    /// A key of these bytes. They should be random: a password is guessed.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// The key that `text` holds, in the form of a key's file.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`]: it is something else. What it holds is not repeated.
    pub fn from_text(text: &str) -> Result<Self> {
        let refuse = |why: String| {
            Error::config("key", why)
                .with_remedy(format!("a key is \"{PREFIX}\" and 64 hexadecimal digits: make one"))
        };
        let digits = text
            .trim()
            .strip_prefix(PREFIX)
            .ok_or_else(|| refuse(format!("it does not begin with {PREFIX:?}")))?;
        if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(refuse(format!("{} characters where 64 digits belong", digits.len())));
        }
        let mut bytes = Zeroizing::new([0; 32]);
        for (byte, at) in bytes.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&digits[at..at + 2], 16)
                .map_err(|_| refuse("not hexadecimal digits".into()))?;
        }
        Ok(Self(bytes))
    }

    /// Reads a key's file, which nobody but its owner may read or write.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`], naming the file and the remedy: it cannot be read, others can read it, or it holds no key.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        read(path.as_ref(), 0o077)
    }

    /// As [`from_file`](Self::from_file), where the file's group may read it as well: so does Kubernetes hand secrets to what
    /// does not run as root.
    ///
    /// # Errors
    ///
    /// As for [`from_file`](Self::from_file).
    pub fn from_file_of_group(path: impl AsRef<Path>) -> Result<Self> {
        read(path.as_ref(), 0o037)
    }

    /// Writes it into a new file that its owner alone may read.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`]: the file is there already, or cannot be written.
    pub fn write_new(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut text = Zeroizing::new(String::with_capacity(PREFIX.len() + 65));
        text.push_str(PREFIX);
        for byte in self.0.iter() {
            for digit in [byte >> 4, byte & 15] {
                text.extend(char::from_digit(digit.into(), 16));
            }
        }
        text.push('\n');
        std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .and_then(|mut file| {
                let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
                // Half a key would be taken for one that is there.
                written.inspect_err(|_| drop(std::fs::remove_file(path)))
            })
            .map_err(|source| {
                let error = Error::config("key", "the file cannot be made")
                    .with_context("file", path.display());
                match source.kind() {
                    std::io::ErrorKind::AlreadyExists => {
                        error.with_remedy("choose another name: a key is never overwritten")
                    }
                    _ => error,
                }
                .with_source(source)
            })
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// `forbidden`: the bits of permission that it must not have.
fn read(path: &Path, forbidden: u32) -> Result<Key> {
    let refuse = |why: String| Error::config("key", why).with_context("file", path.display());
    let io = |source: std::io::Error| {
        refuse(format!("cannot read it: {source}"))
            .with_remedy("make a key, and give each engine of the deployment a copy")
            .with_source(source)
    };
    // What is opened is what is looked at: no other file can take its place in between. A pipe must not hold us up.
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(io)?;
    let found = file.metadata().map_err(io)?;
    if !found.is_file() {
        return Err(refuse("it is no file".into()));
    }
    let mode = found.mode() & 0o777;
    if mode & forbidden != 0 {
        return Err(refuse(format!("others than its owner may use it: its mode is {mode:03o}"))
            .with_remedy("chmod 600 it (Kubernetes: defaultMode 0400); if strangers could read it, make another"));
    }
    let mut text = Zeroizing::new(String::with_capacity(MAX_FILE_BYTES + 1));
    file.take(MAX_FILE_BYTES as u64 + 1).read_to_string(&mut text).map_err(io)?;
    Key::from_text(&text).map_err(|error| error.with_context("file", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A directory of this test's own.
    fn directory(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("kvx-key-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        path
    }

    #[test]
    fn a_key_comes_back_from_its_file_and_is_never_printed() {
        let directory = directory("round");
        let path = directory.join("key");
        let key = Key::generate().unwrap();
        assert!(key != Key::generate().unwrap());
        key.write_new(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(Key::from_file(&path).unwrap() == key);
        assert_eq!(format!("{key:?}"), "Key(..)");
        let error = key.write_new(&path).unwrap_err();
        assert!(error.remedy().unwrap().contains("never overwritten"), "{error}");
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let directory = directory("modes");
        let path = directory.join("key");
        Key::generate().unwrap().write_new(&path).unwrap();
        for (mode, strict, group) in [
            (0o400, true, true),
            (0o600, true, true),
            (0o640, false, true),
            (0o660, false, false),
            (0o604, false, false),
        ] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(Key::from_file(&path).is_ok(), strict, "{mode:o}");
            assert_eq!(Key::from_file_of_group(&path).is_ok(), group, "{mode:o}");
        }
        let error = Key::from_file(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("mode is 604"), "{error}");
        assert!(error.remedy().unwrap().contains("chmod 600"), "{error}");
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn what_is_no_key_says_so_and_does_not_repeat_it() {
        let digits = "5ec2e7".repeat(11);
        for (text, why) in [
            (format!("{PREFIX}{}", &digits[..64]), None),
            (format!(" {PREFIX}{}\n", digits[..64].to_uppercase()), None),
            (digits[..64].to_owned(), Some("does not begin")),
            (format!("{PREFIX}{digits}"), Some("66 characters")),
            (format!("{PREFIX}{}x", &digits[..63]), Some("64 characters")),
            (format!("{PREFIX}{}\u{e9}", &digits[..62]), Some("64 characters")),
            (format!("{PREFIX}+{}", &digits[..63]), Some("64 characters")),
        ] {
            match (Key::from_text(&text), why) {
                (Ok(_), None) => {}
                (Err(error), Some(why)) => {
                    let error = error.to_string();
                    assert!(error.contains(why) && !error.contains("5ec2e7"), "{error}");
                }
                (result, _) => panic!("{text:?}: {result:?}"),
            }
        }
        let error = Key::from_file("/nonexistent/key").unwrap_err();
        assert!(error.to_string().contains("/nonexistent/key"), "{error}");
        assert!(error.remedy().is_some());
    }

    #[test]
    fn a_pipe_in_the_place_of_a_file_holds_nobody_up() {
        let error = Key::from_file("/dev/null").unwrap_err();
        assert!(error.to_string().contains("no file"), "{error}");
    }
}
