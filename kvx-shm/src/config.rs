//! Options, and opening by name.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::registry::Opener;
use kvx_core::{Error, Result};

use crate::backend::ShmBackend;
use crate::error::BACKEND;
use crate::segment::Placement;

/// How to open the backend. Each field is an option of the same name ([`BackendConfig`]).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// Threads that copy: 1 unless said.
    pub copy_threads: usize,
    /// Niceness of the threads that copy, 0 (none unless said) to 19. Where they take all processors, threads that wait for
    /// notifications are else put off by them for up to a tick of the system; threads that compute take as much more of what they share.
    pub copy_nice: u8,
    /// Processors on which this backend's threads may run: any unless said. As text: `0-3+8`.
    pub cpus: Cpus,
    /// Transfers of at least this many bytes are copied by all threads that copy and have nothing else to do, together: 16 MiB
    /// unless said. Of smaller ones waking a second thread takes longer than it saves.
    pub together_bytes: u64,
    /// Reads of at most this many bytes may be carried out within `submit`: 128 KiB unless said, which holds one block of one
    /// layer of most models, and takes less than 20 µs; 0 for none.
    pub inline_bytes: u64,
    /// For programs that poll without sleeping: while one polls at least this often, in microseconds, peers wake no thread
    /// for it. 0 for none, unless said; at most 1000. A program that sleeps all the same is woken later by as much.
    pub spin_us: u64,
    /// Whose processes may connect: those of this user unless said.
    pub users: Users,
    /// Whom this process lets read its borrowed memory where Yama's `ptrace_scope` is 1: its latest peer unless said.
    pub ptracer: Tracer,
    /// How [`allocate`](kvx_core::memory::MemoryRegistry::allocate) makes memory. Two options: `huge_pages` (`never` unless
    /// said, `try`, `require`) and `node`.
    pub placement: Placement,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            copy_threads: 1,
            copy_nice: 0,
            together_bytes: 16 << 20,
            cpus: Cpus::default(),
            inline_bytes: 128 * 1024,
            spin_us: 0,
            users: Users::Same,
            ptracer: Tracer::Peer,
            placement: Placement::new(),
        }
    }
}

/// The names of all options.
const NAMES: &[&str] = &[
    "copy_threads",
    "copy_nice",
    "together_bytes",
    "cpus",
    "inline_bytes",
    "spin_us",
    "users",
    "ptracer",
    "huge_pages",
    "node",
];

/// Most threads that copy.
const MOST_THREADS: usize = 64;
/// The nicest that a thread can be.
const MOST_NICE: u8 = 19;
/// Most microseconds between two polls of a program that is said to spin.
const MOST_SPIN: u64 = 1000;

impl Options {
    /// Reads the options of a [`BackendConfig`].
    ///
    /// # Errors
    ///
    /// [`kvx_core::ErrorKind::Config`], naming the option and its text.
    pub fn read(config: &BackendConfig) -> Result<Self> {
        config.refuse_unknown(NAMES)?;
        let default = Self::default();
        let options = Self {
            copy_threads: config.value("copy_threads")?.unwrap_or(default.copy_threads),
            copy_nice: config.value("copy_nice")?.unwrap_or(default.copy_nice),
            together_bytes: config.value("together_bytes")?.unwrap_or(default.together_bytes),
            cpus: config.value("cpus")?.unwrap_or(default.cpus),
            inline_bytes: config.value("inline_bytes")?.unwrap_or(default.inline_bytes),
            spin_us: config.value("spin_us")?.unwrap_or(default.spin_us),
            users: config.value("users")?.unwrap_or(default.users),
            ptracer: config.value("ptracer")?.unwrap_or(default.ptracer),
            placement: Placement {
                huge_pages: config.value("huge_pages")?.unwrap_or_default(),
                node: config.value("node")?,
            },
        };
        options.check()?;
        Ok(options)
    }

    /// Refuses what is out of range.
    pub(crate) fn check(&self) -> Result<()> {
        let refused = |option: &'static str, value: u64, remedy: String| {
            Err(Error::config("options", format!("{option} is out of range"))
                .with_backend(BACKEND)
                .with_context(option, value)
                .with_remedy(remedy))
        };
        let Self { copy_threads, copy_nice, spin_us, users, .. } = *self;
        if copy_threads == 0 || copy_threads > MOST_THREADS {
            return refused("copy_threads", copy_threads as u64, format!("use 1 to {MOST_THREADS}"));
        }
        if copy_nice > MOST_NICE {
            return refused("copy_nice", copy_nice.into(), format!("use 0 to {MOST_NICE}"));
        }
        if spin_us > MOST_SPIN {
            let late = "a program that sleeps is woken later by as much";
            return refused("spin_us", spin_us, format!("use 0 to {MOST_SPIN}: {late}"));
        }
        match users {
            // To the kernel this number is nobody.
            Users::And(u32::MAX) => {
                refused("users", u32::MAX.into(), "use the number of a user, same or any".into())
            }
            _ => Ok(()),
        }
    }

    pub(crate) const fn spin(&self) -> Duration {
        Duration::from_micros(self.spin_us)
    }
}

/// Processors, by number. None stands for any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cpus(pub Vec<usize>);

/// Reads `0-3+8`: ranges and numbers, with plus signs between.
impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            text.trim().parse::<usize>().ok().filter(|cpu| *cpu < 1024).ok_or_else(|| {
                format!("{text:?} is not a processor's number; write for example 0-3+8")
            })
        };
        let mut cpus = Vec::new();
        for part in text.split('+') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(format!("the range {part:?} is empty"));
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

/// Whose processes may connect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Users {
    /// Those of the user that this process runs as.
    #[default]
    Same,
    /// Those of one other user, too.
    And(u32),
    /// Anybody's.
    Any,
}

impl Users {
    pub(crate) const fn admit(self, mine: u32, theirs: u32) -> bool {
        match self {
            Self::Same => mine == theirs,
            Self::And(other) => mine == theirs || other == theirs,
            Self::Any => true,
        }
    }
}

impl fmt::Display for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same => f.write_str("same"),
            Self::And(user) => write!(f, "{user}"),
            Self::Any => f.write_str("any"),
        }
    }
}

/// Reads `same`, `any`, or a user's number.
impl FromStr for Users {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "same" => Ok(Self::Same),
            "any" => Ok(Self::Any),
            other => other
                .parse()
                .map(Self::And)
                .map_err(|_| format!("{other:?} is none of same, any, or a user's number")),
        }
    }
}

/// Whom Yama is told to let read this process's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tracer {
    /// Nobody.
    None,
    /// The process of the peer that connected last: Yama remembers one.
    #[default]
    Peer,
    /// Every process of this user.
    Any,
}

/// Reads `none`, `peer` or `any`.
impl FromStr for Tracer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "peer" => Ok(Self::Peer),
            "any" => Ok(Self::Any),
            other => Err(format!("{other:?} is none of none, peer, any")),
        }
    }
}

/// Opens the backend.
pub(crate) struct Open;

#[async_trait]
impl Opener for Open {
    async fn open(&self, config: &BackendConfig) -> Result<Arc<dyn TransferBackend>> {
        Ok(ShmBackend::open(&Options::read(config)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::HugePages;

    #[test]
    fn options_have_defaults_and_are_refused_by_name() {
        assert_eq!(Options::read(&BackendConfig::new()).unwrap(), Options::default());
        let text = "copy_threads=2,copy_nice=7,together_bytes=9,cpus=0-2+5,inline_bytes=0,spin_us=50,users=1000,ptracer=any,\
                    huge_pages=try,node=1";
        let options = Options::read(&text.parse().unwrap()).unwrap();
        assert_eq!((options.copy_threads, options.copy_nice, options.together_bytes), (2, 7, 9));
        assert_eq!(options.cpus, Cpus(vec![0, 1, 2, 5]));
        assert_eq!((options.inline_bytes, options.spin_us), (0, 50));
        assert_eq!((options.users, options.ptracer), (Users::And(1000), Tracer::Any));
        let placed = Placement::new().with_huge_pages(HugePages::Try).with_node(1);
        assert_eq!(options.placement, placed);
        for (bad, named) in [
            ("huge_pages=yes", "\"yes\""),
            ("copy_threads=0", "copy_threads"),
            ("spin_us=1001", "spin_us"),
            ("spin_us=18446744073709551615", "spin_us"),
            ("copy_threads=x", "copy_threads"),
            ("copy_nice=20", "copy_nice"),
            ("copy_nice=-1", "copy_nice"),
            ("cpus=3-1", "3-1"),
            ("cpus=a", "processor"),
            ("users=me", "\"me\""),
            ("users=4294967295", "users"),
            ("copy_threads=65", "copy_threads"),
            ("ptracer=all", "\"all\""),
            ("threads=2", "\"threads\""),
        ] {
            let error = Options::read(&bad.parse().unwrap()).unwrap_err();
            assert_eq!(error.kind(), kvx_core::ErrorKind::Config);
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    /// Options that are set in a program are looked at as those that are read from text.
    #[test]
    fn what_is_out_of_range_is_refused_when_it_is_opened() {
        let wrong = |change: fn(&mut Options), named: &str| {
            let mut options = Options::default();
            change(&mut options);
            let error = ShmBackend::open(&options).unwrap_err();
            assert_eq!(error.kind(), kvx_core::ErrorKind::Config);
            assert!(error.to_string().contains(named) && error.remedy().is_some(), "{error}");
        };
        wrong(|options| options.copy_threads = 0, "copy_threads");
        wrong(|options| options.copy_threads = 65, "copy_threads");
        wrong(|options| options.copy_nice = 20, "copy_nice");
        wrong(|options| options.spin_us = 1001, "spin_us");
        wrong(|options| options.users = Users::And(u32::MAX), "users");
    }

    #[test]
    fn users_are_admitted_by_policy() {
        assert!(Users::Same.admit(5, 5) && !Users::Same.admit(5, 6) && !Users::Same.admit(5, 0));
        assert!(Users::And(6).admit(5, 6) && Users::And(6).admit(5, 5) && !Users::And(6).admit(5, 7));
        assert!(Users::Any.admit(5, 7));
    }
}
