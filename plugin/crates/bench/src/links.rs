//! Links between ranks, through a plugin or plain sockets in its place. Each carries messages in
//! one direction.

use std::ops::Range;
use std::time::Instant;

use clap::Args;
use evenkeel_nccl_abi::HANDLE_SIZE;

use crate::cli::options::NetworkOptions;
use crate::error::Result;
use crate::output::record::Network;
use crate::plain_sockets::{PlainConnection, PlainOptions, PlainRequest};
use crate::plugin_host::{self, Connecting, Connection, Listener, Plugin, Region, log};
use crate::ranks::bootstrap::World;
use crate::ranks::wait::{Driver, Wait};

/// What links go through.
#[derive(Args, Clone, Debug)]
pub(crate) struct LinkOptions {
    #[command(flatten)]
    pub(crate) network: NetworkOptions,
    #[command(flatten)]
    plain: PlainOptions,
}

/// One end of a link. Dropping it closes it.
pub(crate) enum Link {
    Plugin(Connection),
    Plain(PlainConnection),
}

/// A message in flight.
pub(crate) enum Request {
    Plugin(plugin_host::Request),
    Plain(PlainRequest),
}

impl Link {
    /// Whether this is the end that receives.
    pub(crate) fn receives(&self) -> bool {
        match self {
            Self::Plugin(connection) => connection.receives(),
            Self::Plain(plain) => !plain.sends(),
        }
    }

    /// Makes a region's memory known to the plugin.
    pub(crate) fn register(&self, region: &Region) -> Result<()> {
        match self {
            Self::Plugin(connection) => connection.register(region),
            Self::Plain(_) => Ok(()),
        }
    }

    /// Begins to move a message from or to a part of a registered region; nothing if there is no
    /// room for it now.
    pub(crate) fn try_post(&self, region: &Region, part: Range<usize>) -> Result<Option<Request>> {
        Ok(match self {
            Self::Plugin(connection) => connection.post(region, part)?.map(Request::Plugin),
            Self::Plain(plain) => plain.post(region, part).map(Request::Plain),
        })
    }

    /// The same, once there is room.
    pub(crate) fn post(
        &self,
        region: &Region,
        part: Range<usize>,
        world: &mut World,
    ) -> Result<Request> {
        let mut wait = Driver::Nccl.wait();
        loop {
            if let Some(request) = self.try_post(region, part.clone())? {
                return Ok(request);
            }
            wait.idle(world, || "posting a message".to_owned())?;
        }
    }
}

impl Request {
    /// The number of bytes moved, once the message is.
    pub(crate) fn test(&mut self) -> Result<Option<usize>> {
        match self {
            Self::Plugin(request) => request.test(),
            Self::Plain(request) => request.test(),
        }
    }
}

/// Waits for messages and gives their lengths. It asks for each in turn, as NCCL's proxy does: a
/// plugin may move a message only while it is asked for it.
pub(crate) fn complete<const N: usize>(
    mut requests: [Request; N],
    driver: Driver,
    world: &mut World,
) -> Result<[usize; N]> {
    let mut lengths = [None; N];
    let mut wait = driver.wait();
    loop {
        for (length, request) in lengths.iter_mut().zip(&mut requests) {
            if length.is_none() {
                *length = request.test()?;
            }
        }
        if lengths.iter().all(Option::is_some) {
            return Ok(lengths.map(Option::unwrap_or_default));
        }
        wait.idle(world, || "moving a message".to_owned())?;
    }
}

/// What is about to be a link.
enum Opening {
    Listener(Listener),
    Connecting(Connecting),
}

/// Listeners of this rank, and what it takes to connect to those of the others.
pub(crate) struct Listening {
    listeners: Vec<Listener>,
    /// The handles of each rank's listeners.
    handles: Vec<Vec<Vec<u8>>>,
}

impl Listening {
    /// Listens for this number of links. All ranks call it together, each with a number of its own.
    ///
    /// # Errors
    /// Says what the plugin said, or which rank is lost.
    pub(crate) fn start(
        plugin: &Plugin,
        device: usize,
        count: usize,
        world: &mut World,
    ) -> Result<Self> {
        let listeners: Vec<Listener> =
            (0..count).map(|_| plugin.listen(device)).collect::<Result<_>>()?;
        let handles: Vec<Vec<u8>> =
            listeners.iter().map(|listener| listener.handle().to_vec()).collect();
        Ok(Self { listeners, handles: world.all_gather(&handles)? })
    }

    /// Accepts links from one rank and connects others to one. Gives those that receive, and then
    /// those that send, in the order of the listeners.
    ///
    /// # Errors
    /// Names the rank at the other end and what the plugin said.
    pub(crate) fn open(
        mut self,
        plugin: &Plugin,
        device: usize,
        (from, to): (usize, usize),
        world: &mut World,
    ) -> Result<Vec<Link>> {
        let (accepted, dialed) = (world.describe(from), world.describe(to));
        let mut openings: Vec<Opening> =
            self.listeners.into_iter().map(Opening::Listener).collect();
        for handle in self.handles.swap_remove(to) {
            let handle: [u8; HANDLE_SIZE] = handle
                .try_into()
                .map_err(|_| format!("{dialed} shared a handle of another size"))?;
            openings.push(Opening::Connecting(plugin.connect(device, handle)?));
        }
        let what = |opening: &Opening| match opening {
            Opening::Listener(_) => format!("accepting {accepted}"),
            Opening::Connecting(_) => format!("connecting to {dialed}"),
        };
        let mut links: Vec<Option<Link>> = openings.iter().map(|_| None).collect();
        let mut left: Vec<(usize, Opening)> = openings.into_iter().enumerate().collect();
        let mut wait = Wait::new();
        while !left.is_empty() {
            let (before, mut at) = (left.len(), 0);
            while let Some((index, opening)) = left.get_mut(at) {
                let polled = match opening {
                    Opening::Listener(listener) => listener.accept(),
                    Opening::Connecting(connecting) => connecting.poll(),
                };
                match polled.map_err(|error| format!("{}: {error}", what(opening)))? {
                    None => at += 1,
                    Some(connection) => {
                        links[*index] = Some(Link::Plugin(connection));
                        left.swap_remove(at);
                    }
                }
            }
            if left.len() < before {
                wait.progress();
            } else {
                wait.idle(world, || what(&left[0].1))?;
            }
        }
        Ok(links.into_iter().flatten().collect())
    }
}

/// What opens links between two ranks.
pub(crate) struct Fabric<'a> {
    options: &'a LinkOptions,
    /// None where plain sockets are in its place.
    plugin: Option<(Plugin, Network)>,
}

impl LinkOptions {
    /// Loads the plugin, unless plain sockets are in its place.
    ///
    /// # Errors
    /// Says what is wrong with the plugin.
    pub(crate) fn open(&self) -> Result<Fabric<'_>> {
        let plugin = match self.plain.plain_sockets {
            Some(_) => None,
            None => Some(self.network.open()?),
        };
        Ok(Fabric { options: self, plugin })
    }
}

impl Fabric<'_> {
    /// What carries the links that are open.
    pub(crate) fn network(&self) -> Network {
        match &self.plugin {
            Some((_, network)) => Network { transport: log::transport(), ..network.clone() },
            None => self.options.plain.network(),
        }
    }

    /// Lets the plugin start the threads that it starts with its first listener, which is kept
    /// open.
    ///
    /// # Errors
    /// What the plugin said.
    pub(crate) fn warm_up(&self) -> Result<Option<Listener>> {
        let listen = |(plugin, _): &(Plugin, _)| plugin.listen(self.options.network.device);
        self.plugin.as_ref().map(listen).transpose()
    }

    /// Opens `count` links on which rank `receiver` receives, in the same order on both ranks. Also
    /// gives the seconds that it took to listen, where that comes first.
    ///
    /// # Errors
    /// Names the rank at the other end.
    pub(crate) fn connect(
        &self,
        count: usize,
        receiver: usize,
        world: &mut World,
    ) -> Result<(Vec<Link>, f64)> {
        let Some((plugin, _)) = &self.plugin else {
            let plain = self.options.plain.connect(world, count, receiver)?;
            return Ok((plain.into_iter().map(Link::Plain).collect(), 0.0));
        };
        let (device, peer) = (self.options.network.device, 1 - world.rank());
        let listeners = if world.rank() == receiver { count } else { 0 };
        let begin = Instant::now();
        let listening = Listening::start(plugin, device, listeners, world)?;
        let seconds = begin.elapsed().as_secs_f64();
        Ok((listening.open(plugin, device, (peer, peer), world)?, seconds))
    }
}
